"""JSON files of committed cost estimates: the command, the versions of packages, and the costs by row."""

import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path


def read_costs(file: Path) -> dict:
    """Return the content of a file of costs; one without rows if it does not exist."""
    return json.loads(file.read_text()) if file.exists() else dict(versions={}, costs={})


def explain_different_versions(
    recorded: dict[str, str | None], versions: dict[str, str | None], kept_rows: Iterable[str]
) -> str | None:
    """Return why rows cannot stay in a file whose other rows are made with other versions; None if they can."""
    differences = [
        f'{package} {version}, recorded {recorded.get(package)}'
        for package, version in versions.items()
        if recorded.get(package) != version
    ]
    kept_rows = sorted(kept_rows)
    if not kept_rows or not differences:
        return None
    return f'versions differ ({"; ".join(differences)}); compile these rows too: {", ".join(kept_rows)}'


def write_costs(file: Path, **content: object) -> None:
    """Write the command of this process and the content to a file of costs."""
    command = f'python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}'
    file.write_text(json.dumps(dict(command=command, **content), indent=2) + '\n')
