"""`tinkex checkpoint push-hf`: an adapter on the Hugging Face hub."""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.command_errors import CommandError
from tinkex.cli.commands import PATH_OR_RUN, Argument, Command
from tinkex.cli.connect import service_client
from tinkex.cli.output import say, show_one
from tinkex.errors import TinkerError

if TYPE_CHECKING:
    import argparse

    from tinkex.clients.rest import RestClient
    from tinkex.types import WeightsInfoResponse

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def push(args: argparse.Namespace) -> None:
    """Upload an adapter to the Hugging Face hub. A model card is added."""
    from tinkex.cli.checkpoint_files import check_downloadable, fetch_checkpoint
    from tinkex.cli.target import checkpoint_named
    from tinkex.clients.rest import RestClient

    chosen = checkpoint_named(args.path)
    path = chosen.model
    check_downloadable(path)
    hub = _hub()
    with (
        service_client(chosen.source) as service,
        tempfile.TemporaryDirectory(prefix="tinkex-push-") as temporary,
    ):
        folder = Path(temporary)
        fetch_checkpoint(service, path, folder)
        _check_adapter(folder)
        info = _weights_info(RestClient(service.holder), path)
        repo, revision = _destination(args, path, info)
        _complete_config(folder / _CONFIG, info)
        if not args.no_model_card and not (folder / "README.md").exists():
            (folder / "README.md").write_text(_card(path, repo, info), encoding="utf-8")
        _upload(hub, args, folder, repo, revision)
    show_one(
        args,
        {
            "checkpoint_path": path,
            "repo_id": repo,
            **({} if revision is None else {"revision": revision}),
            "public": args.public,
        },
        [
            ("Checkpoint Path", path),
            ("Repo ID", repo),
            ("Revision", revision),
            ("Public", args.public),
        ],
    )


def _hub() -> Any:
    """The hub's client, signed in."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise CommandError(
            "huggingface_hub is not installed", "Run: pip install huggingface_hub"
        ) from None
    try:
        hub.HfApi().whoami()
    except Exception as error:
        raise CommandError("Not signed in to the hub", "Run: hf auth login") from error
    return hub


def _check_adapter(folder: Path) -> None:
    if not (folder / _CONFIG).is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        raise CommandError(
            "The checkpoint holds no PEFT adapter",
            f"It needs {_CONFIG} and {_WEIGHTS[0]}; encrypted exports cannot be uploaded.",
        )


def _weights_info(rest: RestClient, path: str) -> WeightsInfoResponse | None:
    try:
        return rest.get_weights_info_by_tinker_path(path).result()
    except TinkerError as error:
        say(f"The base model is not known ({error}); the model card will not name it.")
        return None


def _destination(
    args: argparse.Namespace, path: str, info: WeightsInfoResponse | None
) -> tuple[str, str | None]:
    """Repository and branch; derived from run and checkpoint when no repository is given."""
    if args.repo:
        return args.repo, args.revision
    from tinkex.types import ParsedCheckpointTinkerPath

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    model = info.base_model.split("/")[-1] if info else "adapter"
    return (
        _safe(f"tinker-{model}-{parsed.training_run_id}"),
        args.revision or _safe(parsed.checkpoint_id),
    )


def _safe(name: str) -> str:
    """A name that the hub accepts."""
    return re.sub(r"-{2,}", "-", re.sub(r"[^A-Za-z0-9._-]", "-", name)).strip("-_.")


def _complete_config(file: Path, info: WeightsInfoResponse | None) -> None:
    """Add the base model where the exported configuration lacks it."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandError(f"{_CONFIG} is damaged", str(error)) from error
    if info and not isinstance(config.get("base_model_name_or_path"), str):
        config["base_model_name_or_path"] = info.base_model
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _card(path: str, repo: str, info: WeightsInfoResponse | None) -> str:
    facts = [f"- Checkpoint: `{path}`"]
    head = ["library_name: peft", "tags:", "- tinker", "- peft", "- lora"]
    if info:
        head = [f"base_model: {info.base_model}", *head, f"- base_model:adapter:{info.base_model}"]
        facts.append(f"- Base model: `{info.base_model}`")
        if info.lora_rank is not None:
            facts.append(f"- LoRA rank: {info.lora_rank}")
    return "\n".join(
        [
            "---",
            *head,
            f"tinker_path: {path}",
            "---",
            "",
            f"# {repo.split('/')[-1]}",
            "",
            "A LoRA adapter trained through the Tinker API.",
            "",
            *facts,
            "",
        ]
    )


def _upload(
    hub: Any, args: argparse.Namespace, folder: Path, repo: str, revision: str | None
) -> None:
    api = hub.HfApi()
    repo_id = api.create_repo(repo_id=repo, private=not args.public, exist_ok=True).repo_id
    found = _checkpoint_in(hub, repo_id, revision)
    if found not in (None, args.path):
        raise CommandError(
            f"{repo_id} holds another checkpoint: {found}", "Choose another --repo or --revision."
        )
    if revision is not None:
        api.create_branch(repo_id=repo_id, branch=revision, exist_ok=True)
    ignored: list[str] = args.ignore_pattern or []
    api.upload_folder(
        folder_path=str(folder),
        repo_id=repo_id,
        revision=revision,
        commit_message=args.commit_message,
        create_pr=args.create_pr,
        allow_patterns=args.allow_pattern,
        ignore_patterns=ignored if args.allow_pattern else [*ignored, "checkpoint_complete"],
    )


def _checkpoint_in(hub: Any, repo: str, revision: str | None) -> str | None:
    """The checkpoint that a repository's README names."""
    try:
        file = hub.hf_hub_download(repo_id=repo, filename="README.md", revision=revision)
    except (OSError, ValueError):  # no README, or no such branch yet
        return None
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"tinker://[^\s`]+", text)
    return found[0] if found else None


PUSH = Command(
    push,
    PATH_OR_RUN,
    Argument("-r --repo ID", "repository (default: from model and run)"),
    Argument("--public", "make the repository public"),
    Argument("--revision R", "branch to upload to"),
    Argument("--commit-message M", "message of the commit"),
    Argument("--create-pr", "open a pull request"),
    Argument("--allow-pattern P", "upload only these files", action="append"),
    Argument("--ignore-pattern P", "do not upload these files", action="append"),
    Argument("--no-model-card", "write no README.md"),
)
