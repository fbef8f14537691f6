"""Undefined names in programs that are made from edits: an edit that a renaming forgot fails for the wrong reason."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def find_undefined_names(texts: Mapping[str, str], folder: Path) -> list[str]:
    """List the undefined names of Python texts, as `key:line: name`.

    texts: by a key that names them. folder: empty, for their files.
    """
    keys = {}
    for number, (key, text) in enumerate(texts.items()):
        file = folder / f"{number}.py"
        file.write_text(text)
        keys[file.resolve()] = key
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821"]
    done = subprocess.run([*command, "--output-format", "json", folder], capture_output=True, text=True)
    return sorted(
        f"{keys[Path(found['filename']).resolve()]}:{found['location']['row']}: {found['message']}"
        for found in json.loads(done.stdout)
    )
