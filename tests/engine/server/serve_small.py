"""`pilotfish-engine serve`, with small_core as its model process: its behaviour, then the flags."""

from __future__ import annotations

import sys
from pathlib import Path

from pilotfish_engine.cli import configured, parse
from pilotfish_engine.errors import UsageError
from pilotfish_engine.server.process import refuse, serve

if __name__ == "__main__":
    try:
        config = configured(parse(["serve", *sys.argv[2:]]))
    except UsageError as error:
        sys.exit(refuse(str(error)))
    sys.exit(serve(config, [sys.executable, str(Path(__file__).with_name("small_core.py")), sys.argv[1]]))
