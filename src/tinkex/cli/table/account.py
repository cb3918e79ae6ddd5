"""Who one is, what was used, and the keys of a server of one's own."""

from __future__ import annotations

from tinkex.cli.table.base import Argument, Command, Verbs, whole_number

_SERVER = (
    Argument("--data-dir", metavar="DIR", help="the server's folder (default: ./tinkex-data)"),
    Argument("--database", metavar="URL", help="its database, if that is not in the folder"),
)
_CSV = Argument("--csv", metavar="FILE", help="write CSV to FILE instead; - is standard output")

AUTH: Verbs = (
    "sign in and out, see who you are",
    {
        "login": Command("auth:login", "store an API key as the default"),
        "logout": Command("auth:logout", "forget the stored default key"),
        "status": Command("auth:status", "check the credential and the server"),
        "whoami": Command("auth:whoami", "show whose credential it is"),
    },
)

BILLING: Verbs = (
    "usage of tokens and storage",
    {
        "usage": Command(
            "billing:usage",
            "show usage by the hour",
            Argument("starting_on", metavar="STARTING_ON", help="a full UTC hour, included"),
            Argument(
                "ending_before",
                metavar="ENDING_BEFORE",
                help="a full UTC hour, excluded; at most 14 days later",
            ),
            _CSV,
            Argument(
                "--sessions-csv",
                metavar="FILE",
                help="write the sessions' metadata as CSV to FILE",
            ),
        ),
        "checkpoint-storage": Command(
            "billing:checkpoint_storage",
            "show what the stored checkpoints take up",
            Argument("--project-id", metavar="ID", help="only this project"),
            _CSV,
        ),
    },
)

KEY: Verbs = (
    "the keys of your own server",
    {
        "create": Command(
            "keys:create",
            "make a key and print it, this once",
            Argument("--owner", metavar="NAME", help="whose key it is (default: a new tenant)"),
            Argument("--name", default="", metavar="TEXT", help="what to call it"),
            Argument("--note", default="", metavar="TEXT", help="anything worth remembering"),
            *_SERVER,
        ),
        "list": Command(
            "keys:list_all",
            "list keys; the keys themselves are not kept",
            Argument("--owner", metavar="NAME", help="only this tenant's"),
            *_SERVER,
        ),
        "revoke": Command(
            "keys:revoke",
            "let a key in no more",
            Argument("key_id", type=whole_number(1), metavar="ID", help="as in `tinkex key list`"),
            *_SERVER,
        ),
    },
)
