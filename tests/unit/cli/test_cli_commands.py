"""Commands that look and change: runs, checkpoints, models, sessions, billing."""

from __future__ import annotations

import csv
import io
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import pytest

from tinkex.cli.commands import DONE, FAILED, MISUSED
from tinkex.clients.service import ServiceClient
from tinkex.testing import faults
from tinkex.types import Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran, Saved
    from tinkex.clients.service import CloseStatus
    from tinkex.testing import FakeServer

    Run = Callable[..., Ran]


# -- runs and models ------------------------------------------------------------------------------


def test_runs_are_listed_as_a_table_and_as_json(run: Run, saved: Saved):
    table = run("run", "list")
    assert table.status == DONE
    header, _, *rows = table.out.splitlines()
    assert header.split("  ")[0] == "Run ID"
    assert any(row.startswith(saved.run_id) and "Rank 4" in row for row in rows)
    listed = run("run", "list", "-f", "json").json["runs"]
    assert saved.run_id in [one["training_run_id"] for one in listed]


def test_runs_are_listed_page_by_page_up_to_the_limit(run: Run, server: FakeServer):
    with ServiceClient() as service:
        for _ in range(3):
            service.create_lora_training_client(base_model="tinkex/tiny", rank=1)
    server.requests.clear()
    assert len(run("run", "list", "--limit", "2", "-f", "json").json["runs"]) == 2
    assert len(run("run", "list", "--limit", "0", "-f", "json").json["runs"]) >= 3
    asked = [dict(parse_qsl(seen.query)) for seen in server.seen("list_training_runs")]
    assert [(query["limit"], query["offset"]) for query in asked] == [("2", "0"), ("100", "0")]


def test_columns_can_be_chosen(run: Run, saved: Saved):
    shown = run("run", "list", "-c", "checkpoint, id")
    assert shown.out.splitlines()[0].split() == ["Last", "Checkpoint", "Run", "ID"]


@pytest.mark.parametrize(
    ("words", "word"),
    [(("--columns", "id,age"), "age"), (("--columns", ","), "columns"), (("--limit", "-1"), "-1")],
)
def test_bad_options_are_a_misuse_that_names_them(run: Run, words: tuple[str, ...], word: str):
    ran = run("run", "list", *words)
    assert (ran.status, ran.out) == (MISUSED, "")
    assert word in ran.err


def test_one_run_is_shown_with_its_last_checkpoint(run: Run, saved: Saved):
    shown = run("run", "info", saved.run_id)
    assert "Base Model:       tinkex/tiny" in shown.out
    assert run("run", "info", saved.run_id, "-f", "json").json["lora_rank"] == 4


def made(status: CloseStatus | None = None) -> str:
    """A run of a session that ended so; None: it goes on."""
    service = ServiceClient()
    run_id = service.create_lora_training_client("tinkex/tiny", rank=1).model_id
    if status is not None:
        service.close(status).result()
    return run_id


def shown_status(run: Run, run_id: str) -> str:
    listed = run("run", "list", "--limit", "0", "-f", "json").json["runs"]
    status = {one["training_run_id"]: one["status"] for one in listed}[run_id]
    assert f"Status:       {status.capitalize()}" in run("run", "info", run_id).out
    return status


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("ending", "status"),
    [("success", "finished"), ("interrupted", "interrupted"), ("errored", "failed")],
)
def test_a_run_stands_as_its_session_ended(run: Run, ending: CloseStatus, status: str):
    assert shown_status(run, made(ending)) == status


@pytest.mark.usefixtures("server")
def test_a_run_of_an_open_session_is_running(run: Run):
    with ServiceClient() as service:
        run_id = service.create_lora_training_client("tinkex/tiny", rank=1).model_id
        assert shown_status(run, run_id) == "running"
    assert shown_status(run, run_id) == "finished"


def test_a_server_that_does_not_tell_of_sessions_leaves_the_status_open(
    run: Run, server: FakeServer
):
    run_id = made("success")
    server.faults.on("search_sessions", faults.reply(404), times=None)
    assert shown_status(run, run_id) == "unknown"


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("about", "status"),
    [
        ({"status": "finished"}, "finished"),
        ({"status": "failed"}, "failed"),
        ({"status": "interrupted"}, "interrupted"),
        ({"status": "running", "pid": os.getpid()}, "running"),
        ({"status": "running", "pid": 2**30}, "interrupted"),  # there is no such process
        ({}, "unknown"),
    ],
)
def test_a_run_with_a_folder_stands_as_the_folder_says(
    run: Run, about: dict[str, object], status: str
):
    earlier, run_id = made("success"), made("success")
    folder = Path("runs/mine")
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({**about, "model_ids": [earlier, run_id]}))
    assert shown_status(run, run_id) == status
    assert shown_status(run, earlier) == "interrupted", "it was resumed as another run"
    assert "runs/mine" in run("run", "list", "--limit", "0", "-c", "id,folder").out


@pytest.mark.usefixtures("server")
def test_models_can_be_filtered_by_a_part_of_their_name(run: Run):
    names = [model["model_name"] for model in run("model", "list", "-f", "json").json["models"]]
    assert "tinkex/tiny" in names
    assert "tinkex/tiny" in run("model", "list", "TINY").out
    nothing = run("model", "list", "gigantic")
    assert (nothing.status, nothing.out) == (FAILED, "")
    assert "gigantic" in nothing.err


# -- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_are_listed_of_a_run_or_of_all(run: Run, saved: Saved):
    of_run = run("checkpoint", "list", "--run-id", saved.run_id, "-f", "json").json
    assert of_run["run_id"] == saved.run_id
    paths = {one["tinker_path"] for one in of_run["checkpoints"]}
    assert paths == {saved.training, saved.sampler, saved.external}
    everything = run("checkpoint", "list", "--limit", "0", "-f", "json").json
    assert "run_id" not in everything
    assert paths <= {one["tinker_path"] for one in everything["checkpoints"]}
    assert len(run("checkpoint", "list", "--limit", "1", "-f", "json").json["checkpoints"]) == 1


def test_a_listing_never_cuts_a_path_and_keeps_to_eighty_columns(run: Run, saved: Saved):
    shown = run("checkpoint", "list", "--run-id", saved.run_id)
    assert saved.training in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


def test_an_empty_listing_says_so_beside_the_data(run: Run, server: FakeServer):
    with ServiceClient() as service:
        empty = service.create_lora_training_client(base_model="tinkex/tiny", rank=1).model_id
    shown = run("checkpoint", "list", "--run-id", empty)
    assert (shown.status, shown.out, shown.err) == (DONE, "", "No checkpoints.\n")
    assert run("checkpoint", "list", "--run-id", empty, "-f", "json").json["checkpoints"] == []


def test_one_checkpoint_is_shown_with_its_run(run: Run, saved: Saved):
    shown = run("checkpoint", "info", saved.training)
    for words in ("Type:           training", "LoRA Rank:      4", "Metadata step:  9"):
        assert words in shown.out
    data = run("checkpoint", "info", saved.training, "-f", "json").json
    assert (data["tinker_path"], data["is_lora"]) == (saved.training, True)


def test_a_checkpoint_that_is_not_there_fails(run: Run, saved: Saved):
    missing = run("checkpoint", "info", saved.training + "2")
    assert (missing.status, missing.out) == (FAILED, "")
    assert saved.training + "2" in missing.err


def test_publishing_and_expiry_are_silent_when_done(run: Run, saved: Saved):
    def now() -> dict[str, object]:
        return run("checkpoint", "info", saved.training, "-f", "json").json

    path = saved.training
    for words in (("publish", path), ("set-ttl", path, "--ttl", "7200")):
        ran = run("checkpoint", *words)
        assert (ran.status, ran.out, ran.err) == (DONE, "", "")
    assert now()["public"] is True
    assert now()["expires_at"] is not None
    assert run("checkpoint", "unpublish", path).status == DONE
    assert run("checkpoint", "set-ttl", path, "--remove").status == DONE
    assert (now()["public"], now()["expires_at"]) == (False, None)


@pytest.mark.parametrize("options", [(), ("--ttl", "7200", "--remove")])
def test_expiry_needs_exactly_one_option(run: Run, options: tuple[str, ...]):
    ran = run("checkpoint", "set-ttl", "tinker://run/weights/a", *options)
    assert ran.status == MISUSED
    assert "--remove" in ran.err


@pytest.mark.usefixtures("server")
def test_a_malformed_path_is_a_misuse_that_shows_the_shape(run: Run):
    for words in (("info", "weights/a"), ("publish", "tinker://x"), ("delete", "-y", "nope")):
        ran = run("checkpoint", *words)
        assert ran.status == MISUSED
        assert "tinker://" in ran.err


# -- deleting -------------------------------------------------------------------------------------


def paths_of(run: Run, run_id: str) -> set[str]:
    listed = run("checkpoint", "list", "--run-id", run_id, "-f", "json").json["checkpoints"]
    return {one["tinker_path"] for one in listed}


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_deleting_asks_first(run: Run, saved: Saved, monkeypatch: pytest.MonkeyPatch):
    answer(monkeypatch, "y\n")
    ran = run("checkpoint", "delete", saved.training)
    assert (ran.status, ran.out) == (DONE, "Deleted 1 checkpoint(s)\n")
    assert saved.training in ran.err
    assert paths_of(run, saved.run_id) == {saved.sampler, saved.external}


@pytest.mark.req("B20")
@pytest.mark.parametrize("reply", ["n\n", "\n", "perhaps\n", ""])
def test_without_a_yes_nothing_is_deleted_and_the_command_fails(
    run: Run, saved: Saved, monkeypatch: pytest.MonkeyPatch, reply: str
):
    answer(monkeypatch, reply)
    ran = run("checkpoint", "delete", saved.training)
    assert (ran.status, ran.out) == (FAILED, "")
    assert "Nothing was deleted" in ran.err
    assert saved.training in paths_of(run, saved.run_id)


@pytest.mark.req("B20")
def test_a_failed_delete_fails_the_command_and_names_the_path(run: Run, saved: Saved):
    gone = saved.training + "-gone"
    ran = run("checkpoint", "delete", "-y", saved.training, gone, "-f", "json")
    assert ran.status == FAILED
    assert ran.json["deleted_count"] == 1
    assert [one["tinker_path"] for one in ran.json["failed"]] == [gone]
    assert gone in ran.err
    assert saved.training not in paths_of(run, saved.run_id)


def test_many_are_deleted_a_few_at_a_time(run: Run, saved: Saved, server: FakeServer):
    wanted = [f"tinker://{saved.run_id}/weights/none-{i}" for i in range(70)]
    ran = run("checkpoint", "delete", "-y", *wanted, wanted[0], "-f", "json")
    assert ran.status == FAILED
    assert [one["tinker_path"] for one in ran.json["failed"]] == wanted
    assert len(server.seen("delete_checkpoint")) == 70


def test_a_run_is_cleared_by_kind_and_age(run: Run, saved: Saved):
    def delete(*options: str) -> int:
        words = ("checkpoint", "delete", "-y", "--run-id", saved.run_id, *options, "-f", "json")
        return run(*words).json["deleted_count"]

    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    assert delete("--before", "2020-01-01") == 0
    assert delete("--after", tomorrow) == 0
    assert delete("--type", "sampler") == 1
    assert delete("--type", "external_weights", "--before", tomorrow, "--after", "2020-01-01") == 1
    assert paths_of(run, saved.run_id) == {saved.training}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("tinker://run/weights/a", "--run-id", "run"),
        ("tinker://run/weights/a", "--type", "weights"),
        ("--run-id", "run", "--type", "wights"),
    ],
)
def test_what_to_delete_must_be_clear(run: Run, words: tuple[str, ...]):
    assert run("checkpoint", "delete", "-y", *words).status == MISUSED


def test_a_malformed_date_is_a_misuse(run: Run, saved: Saved):
    ran = run("checkpoint", "delete", "-y", "--run-id", saved.run_id, "--before", "soon")
    assert ran.status == MISUSED
    assert "soon" in ran.err


# -- sessions and billing -------------------------------------------------------------------------


@pytest.fixture
def used(server: FakeServer) -> str:
    """A session that has trained and sampled."""
    with ServiceClient() as service:
        training = service.create_lora_training_client(base_model="tinkex/tiny", rank=4)
        datum = Datum(
            model_input=ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
        )
        training.forward_backward([datum, datum], "cross_entropy").result()
        sampler = training.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=5, seed=1)
        sampler.sample(ModelInput.from_ints([1, 2, 3, 4]), 2, params).result()
        assert service.holder.session_id is not None
        return service.holder.session_id


@pytest.mark.req("B17")
def test_a_sessions_tokens_are_added_up(run: Run, used: str):
    totals = run("session", "usage", used, "-f", "json").json
    assert totals["session_id"] == used
    assert totals["trained_tokens"] == 6
    assert totals["prompt_tokens"] >= 4
    assert 0 < totals["generated_tokens"] <= 10
    shown = run("session", "usage", used, "--since", "2026-01-01")
    assert shown.status == DONE
    assert "Tokens trained:     6" in shown.out


@pytest.mark.usefixtures("server")
def test_a_session_without_usage_says_since_when_it_looked(run: Run):
    ran = run("session", "usage", "nobody", "--since", "2026-03-01")
    assert ran.status == DONE
    assert "No usage of nobody since 2026-03-01" in ran.err


@pytest.mark.parametrize("since", ["2999-01-01", "long ago"])
def test_a_session_cannot_be_counted_from_nonsense(run: Run, since: str):
    ran = run("session", "usage", "s", "--since", since)
    assert ran.status in (FAILED, MISUSED)
    assert since in ran.err


def test_a_trace_is_saved_or_its_link_printed(run: Run, used: str):
    saved = run("session", "export-trace", used)
    assert saved.status == DONE
    assert Path(f"{used}.pftrace").read_bytes().startswith(b"{")
    link = run("session", "export-trace", used, "--url-only")
    assert link.out.startswith("http://127.0.0.1")
    assert len(link.out.splitlines()) == 1
    data = run("session", "export-trace", used, "-o", "deep/t.json", "-f", "json").json
    assert data["file_size_bytes"] == Path("deep/t.json").stat().st_size


def two_days() -> tuple[str, str]:
    """Yesterday as well: midnight may have passed since something was used."""
    day = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return (day - timedelta(days=1)).isoformat(), (day + timedelta(days=1)).isoformat()


def test_usage_is_shown_by_the_hour(run: Run, used: str):
    shown = run("billing", "usage", *two_days())
    assert shown.status == DONE
    assert "training" in shown.out
    data = run("billing", "usage", *two_days(), "-f", "json").json
    assert set(data) == {"data", "sessions", "cost_data_through"}
    assert used in data["sessions"]


def test_usage_is_written_as_csv_instead(run: Run, used: str):
    written = run("billing", "usage", *two_days(), "--csv", "u.csv", "--sessions-csv", "-")
    rows = list(csv.DictReader(io.StringIO(Path("u.csv").read_text())))
    assert {"type", "token_count", "session_id"} <= set(rows[0])
    assert used in {row["session_id"] for row in csv.DictReader(io.StringIO(written.out))}


@pytest.mark.usefixtures("server")
def test_a_window_that_is_no_full_hour_is_a_misuse(run: Run):
    ran = run("billing", "usage", "2026-01-01T00:30", "2026-01-02")
    assert ran.status == MISUSED
    assert "full UTC hour" in ran.err


def test_storage_is_shown_and_written_as_csv(run: Run, saved: Saved):
    assert "Checkpoints" in run("billing", "checkpoint-storage").out
    data = run("billing", "checkpoint-storage", "-f", "json").json
    assert data["data"][0]["checkpoint_count"] >= 3
    rows = csv.DictReader(io.StringIO(run("billing", "checkpoint-storage", "--csv", "-").out))
    assert int(next(rows)["checkpoint_count"]) >= 3


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.req("B20")
def test_a_missing_key_is_called_a_missing_key(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TINKER_API_KEY")
    ran = run("run", "list")
    assert (ran.status, ran.out) == (FAILED, "")
    assert "No usable API key" in ran.err
    assert "tinkex auth login" in ran.err
    assert "connect" not in ran.err
    assert server.requests == []


@pytest.mark.req("B20")
@pytest.mark.parametrize(
    ("status", "heading"),
    [
        (400, "Invalid request"),
        (401, "Authentication failed"),
        (403, "Permission denied"),
        (404, "Resource not found"),
        (418, "API error (status 418)"),
        (422, "Invalid data provided"),
    ],
)
def test_a_refusal_has_a_heading_and_what_the_server_said(
    run: Run, server: FakeServer, status: int, heading: str
):
    server.faults.on("get_training_run", faults.reply(status, {"detail": "because"}))
    ran = run("run", "info", "some-run")
    assert (ran.status, ran.out) == (FAILED, "")
    first, second, *_ = ran.err.splitlines()
    assert (first, second) == (f"Error: {heading}", "  because")
