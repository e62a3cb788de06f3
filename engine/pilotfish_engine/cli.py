"""`pilotfish-engine`: flags in, one sentence for what cannot work (code 2, or 75: not yet), else the server's own code.

Knows flags and nothing of what they do. Serving imports no torch here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pilotfish_engine.bench.plan import add_flags as add_bench_flags
from pilotfish_engine.config import MODEL, OPTIONS, EngineConfig, resolve, share_cores
from pilotfish_engine.errors import UsageError
from pilotfish_engine.server.process import refuse, serve
from pilotfish_engine.source import is_local
from pilotfish_engine.source import resolve as resolve_source
from pilotfish_engine.speculation import registry
from pilotfish_engine.train.settings import add_flags as add_train_flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help lists what would work")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Ends the interpreter: 0 after a clean stop, 2 for what the caller must change, 75 for what may come, else 1."""
    try:
        flags = parse(arguments)
        if flags["command"] == "inspect":
            _inspect(flags)
        if flags["command"] == "bench":
            _bench(flags)
        if flags["command"] == "train-draft":
            _train(flags)
        config = configured(flags)
    except UsageError as error:
        sys.exit(refuse(str(error), error.exit_code))
    sys.exit(serve(config))


def configured(flags: Mapping[str, str | None]) -> EngineConfig:
    """The configuration, with everything checked that can be without loading a model. Raises UsageError."""
    config = resolve(flags)
    speculation = config.speculation
    registry.check(speculation.method, speculation.draft, speculation.draft_corpus)
    for source in (config.model.source, speculation.draft):
        if source is not None and is_local(source):
            resolve_source(source)
    return config


def _inspect(flags: Mapping[str, Any]) -> NoReturn:
    """1 where the checkpoint does not fit the target that is named."""
    from pilotfish_engine.inspection import describe, json_of, text_of  # imports torch

    config = resolve({key: flags[key] for key in (MODEL.key, *_OF_INSPECT)}, {})
    found = describe(config, flags["target"])
    print(json_of(found) if flags["json"] else text_of(found))
    sys.exit(0 if found.fit is None or found.fit.fits else 1)


def _bench(flags: Mapping[str, Any]) -> NoReturn:
    from pilotfish_engine.bench.run import bench  # and what only a client needs

    sys.exit(bench(flags))


def _train(flags: Mapping[str, Any]) -> NoReturn:
    from pilotfish_engine.train.settings import from_flags

    settings = from_flags(flags)
    share_cores()
    from pilotfish_engine.train.run import train  # imports torch

    train(settings)
    sys.exit(0)


def parse(arguments: Sequence[str] | None) -> dict[str, Any]:
    """Flags by Option.key, and the command. Raises UsageError."""
    return vars(_parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pilotfish-engine", description="The Pilotfish inference engine.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serving = commands.add_parser(
        "serve",
        help="serve a model over the OpenAI API",
        description="Serve a model over the OpenAI API. Every flag can be set by its variable instead.",
        allow_abbrev=False,
    )
    serving.add_argument(MODEL.key, metavar=MODEL.metavar, nargs="?", help=f"{MODEL.help} [{MODEL.variable}]")
    inspecting = commands.add_parser("inspect", help="say what a checkpoint is", allow_abbrev=False)
    _add_inspect_flags(inspecting)
    benching = commands.add_parser(
        "bench",
        help="measure any server of OpenAI's API under load",
        description="Measure any server of OpenAI's API under load.",
        allow_abbrev=False,
    )
    add_bench_flags(benching)
    training = commands.add_parser(
        "train-draft",
        help="distil a draft from a model's own answers",
        description="Distil an EAGLE-3 head from a model's own answers. The same command goes on after a kill.",
        allow_abbrev=False,
    )
    training.add_argument(MODEL.key, metavar="TARGET", help=MODEL.help)
    add_train_flags(training)
    for option in OPTIONS:
        text = f"{option.help} [{option.variable}]"
        if option.metavar == "BOOL":
            serving.add_argument(option.flag, dest=option.key, action="store_const", const="true", help=text)
            serving.add_argument(
                option.flag.replace("--", "--no-", 1), dest=option.key, action="store_const", const="false"
            )
        else:
            serving.add_argument(option.flag, dest=option.key, metavar=option.metavar, help=text)
    return parser


_OF_INSPECT = ("max_model_len", "max_running_requests")


def _add_inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(MODEL.key, metavar=MODEL.metavar, help=MODEL.help)
    parser.add_argument("--target", metavar="T", help="model beside which MODEL would draft, in the same forms")
    for option in OPTIONS:
        if option.key in _OF_INSPECT:
            parser.add_argument(option.flag, dest=option.key, metavar=option.metavar, help=option.help)
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")


if __name__ == "__main__":
    main()
