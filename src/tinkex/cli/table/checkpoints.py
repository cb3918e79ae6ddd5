"""What there is to do with checkpoints."""

from __future__ import annotations

from tinkex.cli.table.base import LIMIT, MADE, PATH, Argument, Command, Verbs

CHECKPOINT: Verbs = (
    "list, share, download, export, import and delete checkpoints",
    {
        "list": Command(
            "checkpoints:list_all",
            "list checkpoints, newest first",
            Argument("--run-id", metavar="ID", help="only, and all, of this training run"),
            LIMIT,
        ),
        "info": Command("checkpoints:info", "show one checkpoint", MADE),
        "publish": Command("checkpoints:publish", "let everybody use a checkpoint", PATH),
        "unpublish": Command("checkpoints:unpublish", "make a checkpoint private", PATH),
        "set-ttl": Command(
            "checkpoints:set_ttl",
            "set when a checkpoint expires",
            PATH,
            Argument("--ttl", type=int, metavar="SECONDS", help="expire so long from now"),
            Argument("--remove", action="store_true", help="keep it for ever"),
        ),
        "delete": Command(
            "deletion:delete",
            "delete checkpoints for good",
            Argument("paths", nargs="*", metavar="PATH", help="checkpoints to delete"),
            Argument("--run-id", metavar="ID", help="delete those of this training run"),
            Argument(
                "--type",
                dest="kind",
                choices=(
                    "weights",
                    "sampler_weights",
                    "external_weights",
                    "training",
                    "sampler",
                    "external",
                ),
                metavar="KIND",
                help="with --run-id: only weights, sampler_weights or external_weights",
            ),
            Argument("--before", metavar="DATE", help="with --run-id: only older (ISO, UTC)"),
            Argument("--after", metavar="DATE", help="with --run-id: only newer (ISO, UTC)"),
            Argument("-y", "--yes", action="store_true", help="do not ask"),
        ),
        "download": Command(
            "download:download",
            "download a checkpoint's files",
            MADE,
            Argument("-o", "--output", metavar="DIR", help="where the folder is made"),
            Argument("--force", action="store_true", help="replace the folder if it exists"),
        ),
        "export": Command(
            "export:export",
            "write a checkpoint as files other programs load, and check them",
            MADE,
            Argument("-o", "--output", metavar="DIR", required=True, help="the folder to write"),
            Argument(
                "--layout",
                choices=("peft", "merged"),
                default="peft",
                metavar="NAME",
                help="peft: the adapter alone; merged: a whole model (default: peft)",
            ),
            Argument(
                "--base",
                metavar="MODEL",
                help="folder, GGUF file or hub id of the base model (default: its name)",
            ),
            Argument(
                "--dtype",
                choices=("float32", "bfloat16", "float16"),
                metavar="NAME",
                help="of a merged model: float32, bfloat16, float16 (default: its base's)",
            ),
            Argument("--force", action="store_true", help="replace the folder if it exists"),
        ),
        "import": Command(
            "importing:import_",
            "upload a PEFT adapter to a tinkex server, and check it there",
            Argument("folder", metavar="PEFT_DIR", help="a folder with an adapter"),
            Argument(
                "--model", metavar="NAME", help="its base model (default: what the folder says)"
            ),
            Argument("--name", metavar="NAME", help="the checkpoint's name (default: imported)"),
            Argument(
                "--kind",
                choices=("weights", "sampler_weights"),
                default="weights",
                metavar="KIND",
                help="weights to train and sample; sampler_weights to sample (default: weights)",
            ),
            Argument(
                "--base",
                metavar="MODEL",
                help="folder, GGUF file or hub id of the base model, to compare with",
            ),
        ),
        "push-hf": Command(
            "hub:push",
            "upload an adapter to the Hugging Face hub",
            MADE,
            Argument("-r", "--repo", metavar="ID", help="repository; derived if not given"),
            Argument("--public", action="store_true", help="make the repository public"),
            Argument("--revision", metavar="R", help="branch to upload to"),
            Argument("--commit-message", metavar="M", help="message of the commit"),
            Argument("--create-pr", action="store_true", help="open a pull request"),
            Argument(
                "--allow-pattern", action="append", metavar="P", help="upload only these files"
            ),
            Argument(
                "--ignore-pattern", action="append", metavar="P", help="leave out these files"
            ),
            Argument("--no-model-card", action="store_true", help="write no README.md"),
        ),
    },
)
