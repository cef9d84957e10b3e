"""MkDocs hook that adds the generated pages and replaces links to repository files by plain names.

mkdocs.yml names this file under `hooks`.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # generate pages from the code of this clone

from docs import reference  # noqa: E402

LINK_PATTERN = re.compile(r'(?<!!)\[([^\]\[]*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)')


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the files of the site.

    Raises:
        PluginError: a file in docs/ has the path of a generated page.
    """
    for name, text in reference.build_pages().items():
        path = f'reference/{name}'
        if existing_file := files.get_file_from_path(path):
            raise PluginError(
                f'docs/{path} is generated at build time, and {existing_file.abs_src_path} is there; remove it'
            )
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside of docs/, which the site does not contain, by the path of the file."""
    page_dir = (ROOT / 'docs' / page.file.src_uri).parent

    def replace_link(match: re.Match) -> str:
        link_text, target, _ = match.groups()
        path = (page_dir / target).resolve()
        if path.is_relative_to(ROOT / 'docs') or not path.is_relative_to(ROOT):
            return match[0]
        if not path.exists():
            raise PluginError(f'{page.file.src_uri} links to {target}, which is not in the repository')
        relative_path = path.relative_to(ROOT).as_posix()
        return link_text if relative_path in link_text.strip('`') else f'{link_text} (`{relative_path}`)'

    markdown = markdown.replace('```console', '```sh')  # highlighting takes lines without a prompt for output
    return LINK_PATTERN.sub(replace_link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark inline code that fits into a line of a phone, which docs/assets/site.css does not break."""
    return re.sub(r'<code>(?=[^<]{1,40}</code>)', '<code class="short">', html)
