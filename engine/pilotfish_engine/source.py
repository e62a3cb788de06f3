"""Where a model's files lie: `resolve` turns hf:// pvc:// file:// package:// or a plain path into a local path.

Knows nothing about what is in the files beyond what tells a GGUF file and a checkpoint folder from anything else.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pilotfish_engine.errors import CheckpointError, NotYetError
from pilotfish_engine.files import check_regular

PVC_ROOT = Path("/mnt/models")  # pvc://CLAIM/PATH is PVC_ROOT/CLAIM/PATH: the operator mounts the claim there
FORMS = "a folder, a .gguf file, or hf://OWNER/REPO, pvc://CLAIM/PATH, file:///PATH, package://MODULE/PATH"
_WANTED = ("*.safetensors", "*.json", "*.jinja")  # no pickles, no code


def resolve(source: str) -> Path:
    """The absolute path of a GGUF file or of a folder with a config.json.

    hf:// downloads into the Hugging Face cache unless it is there; the other forms touch no network. Raises
    CheckpointError with one sentence when nothing is there, or something else; NotYetError where that may change.
    """
    path = _locate(source)
    try:
        if not path.exists():
            missing = NotYetError if source.startswith("pvc://") else CheckpointError  # a claim may be filled later
            raise missing(f"model {source!r}: {path} does not exist; give {FORMS}")
        if path.is_dir():
            return _checked_folder(source, path)
        check_regular(path)
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"model {source!r}: {path} cannot be read ({error.strerror}); give {FORMS}") from error
    if magic != b"GGUF":
        raise CheckpointError(
            f"model {source!r}: {path} is not a GGUF file (it starts with {magic!r}); give a .gguf file, "
            "or a folder with config.json and safetensors"
        )
    return path


def is_local(source: str) -> bool:
    """Whether `resolve` touches no network, so that it can run before anything else does."""
    return not source.startswith("hf://")


def default_name(source: str) -> str:
    """The name that a model is served under when none is given: its file's or folder's, without .gguf."""
    return source.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf") or source


def _checked_folder(source: str, path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    inside = sorted(entry.name for entry in path.glob("*.gguf"))
    hint = f"; give one of its GGUF files: {', '.join(inside[:5])}" if inside else f"; give {FORMS}"
    raise CheckpointError(f"model {source!r}: the folder {path} has no config.json{hint}")


def _locate(source: str) -> Path:
    scheme, separator, rest = source.partition("://")
    if not separator:
        return Path(source).expanduser().absolute()
    if not rest.strip("/"):
        raise CheckpointError(f"model {source!r}: nothing follows {scheme}://; give {FORMS}")
    match scheme:
        case "file":
            return Path("/" + rest.lstrip("/"))
        case "pvc":
            return _inside(source, PVC_ROOT, rest)
        case "package":
            return _in_package(source, rest)
        case "hf":
            return _from_hub(source, rest)
    raise CheckpointError(f"model {source!r}: {scheme}:// is not a known scheme; give {FORMS}")


def _inside(source: str, root: Path, relative: str) -> Path:
    if ".." in Path(relative).parts:
        raise CheckpointError(f"model {source!r}: '..' leads out of {root}; give a path below it")
    return root / relative.lstrip("/")


def _in_package(source: str, rest: str) -> Path:
    module, _, relative = rest.partition("/")
    try:  # a top-level module is found without being imported; a dotted name would import its parent
        spec = importlib.util.find_spec(module) if "." not in module else None
    except ValueError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            f"model {source!r}: no Python package {module!r} is installed here; install it, or give {FORMS}"
        )
    return _inside(source, Path(next(iter(spec.submodule_search_locations))), relative)


def _from_hub(source: str, rest: str) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download  # slow to import, and seldom needed

    repo_and_file, _, revision = rest.partition("@")
    owner, _, tail = repo_and_file.strip("/").partition("/")
    name, _, file = tail.partition("/")
    if not owner or not name:
        raise CheckpointError(f"model {source!r}: a Hugging Face source is hf://OWNER/REPO[/FILE.gguf][@REVISION]")
    repo = f"{owner}/{name}"
    try:
        if file:
            return Path(hf_hub_download(repo, file, revision=revision or None))
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=list(_WANTED)))
    except Exception as error:  # the library raises its own, its HTTP client's and the system's
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise (CheckpointError if _not_published(error) else NotYetError)(
            f"model {source!r}: {repo} cannot be downloaded ({reason.rstrip('.')}); "
            "give a repository that can be reached from here, or a local folder or .gguf file"
        ) from error


def _not_published(error: Exception) -> bool:
    """Whether the hub answered that there is no such thing; all else (access, limits, the way there) may change."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return True
    missing = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)
    response = getattr(error, "response", None)
    gated = isinstance(error, errors.GatedRepoError)
    return isinstance(error, missing) and not gated and getattr(response, "status_code", None) == 404
