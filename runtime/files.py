"""Things that others published, by the name of a local directory or of a repository on the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path

from errors import Refused


def fetch(name: str, flag: str, files: list[str], kind: str = "model", revision: str | None = None, *, holding: str = "") -> Path:
    """The directory with these files (patterns): a local one as it is, one from the hub downloaded once."""
    path = Path(name)
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.endswith("/") or len(path.parts) > 2 or path.is_file():
        raise Refused(f"{flag} {name}: no such directory; it would be one with {holding or ', '.join(files)}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise Refused(
            f"{flag} {name}: no such directory here, and no {kind} of that name could be had from the hub ({reason}); "
            f"give the path of a local directory with {holding or ', '.join(files)}"
        ) from None


def fetch_network(name: str, flag: str, more: Sequence[str] = (), *, holding: str = "") -> Path:
    """The directory of a Hugging Face network, with its configuration and weights; `more` may be there or not."""
    needed = ["config.json", "model.safetensors"]
    place = fetch(name, flag, [*needed, *more], holding=holding)
    for file in needed:
        if not (place / file).exists():
            raise Refused(f"{flag} {name}: it has no {file}")
    return place
