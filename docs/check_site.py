"""Check of the built site: links, anchors, and files that a page would load from a network.

    python docs/check_site.py build/docs

MkDocs checks the links of Markdown pages. This script also checks links of the theme and links in HTML of pages. It
prints one line for each fault, and exits with 1 if there is a fault.
"""

import argparse
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED_ATTRIBUTES = {'script': 'src', 'img': 'src', 'iframe': 'src', 'source': 'src', 'link': 'href'}
UNLOADED_RELS = ('canonical', 'prev', 'next')  # values of rel with which a browser loads nothing


class PageParser(HTMLParser):
    """Parser of the links, the loaded URLs and the anchors of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.loaded_urls, self.anchors = [], [], set()
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors |= {values[name] for name in ('id', 'name') if values.get(name)}
        if tag == 'a' and values.get('href') is not None:
            self.links.append(values['href'])
        target = values.get(LOADED_ATTRIBUTES.get(tag, ''))
        if target and values.get('rel') not in UNLOADED_RELS:
            self.loaded_urls.append(target)


def find_faults(site: Path) -> Iterator[str]:
    """Yield one line for each broken link and for each file that would be loaded from a network."""
    pages = {path: PageParser(path) for path in sorted(site.rglob('*.html'))}
    for path, page in pages.items():
        if path.name == '404.html':  # its links begin with /, because a server shows it at any path
            continue
        name = path.relative_to(site)
        for target in page.loaded_urls:
            if urlsplit(target).scheme in ('http', 'https') or target.startswith('//'):
                yield f'{name} loads {target}'
        for target in dict.fromkeys([*page.links, *page.loaded_urls]):
            if fault := find_link_error(path, target, pages):
                yield f'{name} links to {target}, {fault}'
    for path in sorted(site.rglob('*.css')):
        if 'url(http' in path.read_text(encoding='utf-8') or '@import' in path.read_text(encoding='utf-8'):
            yield f'{path.relative_to(site)} loads a file from elsewhere'


def find_link_error(path: Path, target: str, pages: dict[Path, PageParser]) -> str:
    """Return the fault of a link of a page; '' if the link is valid or leaves the site."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return ''
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if file.is_dir():
        file /= 'index.html'
    if not file.exists():
        return 'which is not there'
    if parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
        return 'which has no such anchor'
    return ''


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('site', type=Path, help='the folder of the built site')
    fault_lines = list(find_faults(parser.parse_args().site.resolve()))
    for fault in fault_lines:
        print(f'check_site: {fault}', file=sys.stderr)
    return 1 if fault_lines else 0


if __name__ == '__main__':
    sys.exit(main())
