"""`pilotfish-engine serve`, with small_core as its model process: its behaviour, then the flags."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from pilotfish_engine.cli import configured, parse
from pilotfish_engine.errors import UsageError
from pilotfish_engine.server.process import refuse, serve
from tests.engine.server.small_core import Behaviour

if __name__ == "__main__":
    try:
        config = configured(parse(["serve", *sys.argv[2:]]))
    except UsageError as error:
        sys.exit(refuse(str(error)))
    core = [sys.executable, str(Path(__file__).with_name("small_core.py")), sys.argv[1]]
    sys.exit(serve(config, core, msgspec.json.decode(sys.argv[1], type=Behaviour).patience))
