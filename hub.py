"""Things that others published, by the name of a local directory or of a repository on the Hugging Face hub."""

from pathlib import Path

from errors import Refused


def fetch(name: str, flag: str, files: list[str], kind: str = "model") -> Path:
    """The directory with these files (patterns): a local one as it is, one from the hub downloaded once."""
    if Path(name).is_dir():
        return Path(name)
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise Refused(
            f"{flag} {name}: no such directory here, and no {kind} that can be had from the hub ({type(error).__name__}); "
            f"give the path of a local directory with {', '.join(files)}"
        ) from None
