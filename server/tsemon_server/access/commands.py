"""`tsemon token`: lets programs and people in. What a command needs beyond the command line is imported inside it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tsemon.errors import InvalidArgument
from tsemon.terminal import Cell, Column, examples, moment, print_json, print_table, say
from tsemon_server.options import AnyDatabase, AsJson, url_of

if TYPE_CHECKING:
    from tsemon_server.store import Store
    from tsemon_server.store.ledger.tokens import StoredToken

app = typer.Typer(help="Make, show and revoke the tokens that let programs and people in.", no_args_is_help=True)


@app.command(
    epilog=examples(
        "tsemon token create laptop --scope admin",
        "tsemon token create cluster --scope ingest --scope read --project vision --expires 90d",
        "tsemon token create prometheus --scope metrics --out /etc/tsemon/metrics.token",
    )
)
def create(
    name: Annotated[str, typer.Argument(help="Purpose of the token, as `list` shows it.")],
    scope: Annotated[
        list[str],
        typer.Option(
            help="ingest: send runs; read: look at them; metrics: scrape; admin: everything. May be repeated."
        ),
    ],
    project: Annotated[str | None, typer.Option(help="Only for this project.")] = None,
    expires: Annotated[str, typer.Option(help="When it ends by itself: 12h, 90d, 2w, forever.")] = "forever",
    out: Annotated[
        Path | None,
        typer.Option(help="Write it to this file instead, unless a valid token for the same is there already."),
    ] = None,
    database: AnyDatabase = None,
) -> None:
    """Make a token and show it, once: only a digest of it is kept."""
    import time

    from tsemon_server.access.tokens import new_token
    from tsemon_server.durations import seconds_of

    scopes = _scopes(scope)
    _check_name("name", name)
    if project is not None:
        _check_name("project", project)
        if "metrics" in scopes:
            raise InvalidArgument("expected no --project with the scope metrics, for /metrics shows all runs")
    lifetime_s = seconds_of(expires)
    expires_at = None if lifetime_s is None else time.time() + lifetime_s
    store = _open(database)
    before = None if out is None else _held(store, out)
    if out is not None and before is not None and _state(before) == "valid":
        if (before.scopes, before.project) != (scopes, project):
            store.close()
            raise InvalidArgument(
                f"{out} holds a valid token for something else, {before.token_id}; choose another file"
            )
        _hide(out)
        say(f"{out}: holds a valid token already")
        store.close()
        return
    token = new_token()
    if out is not None:
        _write(out, token.text)  # first: a token that nobody got must not be left
    store.tokens.add(
        token.token_id, name=name, digest=token.digest, scopes=scopes, project=project, expires_at=expires_at
    )
    store.close()
    say(token.text if out is None else f"{out}: a new token, {token.token_id}")


@app.command(
    "list",
    epilog=examples(
        "tsemon token list",
        "tsemon token list --json | jq -r '.[] | select(.state == \"expired\") | .token_id'",
    ),
)
def show_all(as_json: AsJson = False, database: AnyDatabase = None) -> None:
    """List tokens with their ids, scopes and last use, without secrets."""
    store = _open(database)
    tokens = store.tokens.all()
    store.close()
    if as_json:
        print_json([_described(token) for token in tokens])
    elif not tokens:
        say(f"{store.where}: no tokens; `tsemon token create NAME --scope admin` makes the first")
    else:
        names = ("id", "state", "scopes", "project", "used", "name")
        print_table([Column(name, flexible=name in ("project", "name")) for name in names], [*map(_cells, tokens)])


def _cells(token: StoredToken) -> list[Cell]:
    state = _state(token)
    return [
        token.token_id,
        (state, "green" if state == "valid" else "dim"),
        ",".join(token.scopes),
        "all projects" if token.project is None else token.project,
        "never" if token.last_used_at is None else moment(token.last_used_at),
        token.name,
    ]


@app.command(epilog=examples("tsemon token revoke 1f0c6a4be2d93875"))
def revoke(
    token_id: Annotated[
        str, typer.Argument(help="The id, as `list` shows it: the first part of the token after tsm_.")
    ],
    database: AnyDatabase = None,
) -> None:
    """Revoke a token: it stops working within five seconds."""
    if token_id.startswith("tsm_"):
        raise InvalidArgument("expected a token's id, which stands between `tsm_` and the next `_`, got all of a token")
    store = _open(database)
    is_known = store.tokens.revoke(token_id)
    store.close()
    if not is_known:
        raise InvalidArgument(f"expected the id of a token, as `tsemon token list` shows them, got {token_id!r:.80}")
    say(f"{token_id}: revoked")


def _open(database: str | None) -> Store:
    from tsemon_server.store import Store

    return Store(url_of(database or None))


def _scopes(given: list[str]) -> tuple[str, ...]:
    from tsemon_server.access.tokens import SCOPES

    unknown = [scope for scope in given if scope not in SCOPES]
    if unknown:
        raise InvalidArgument(f"expected scopes of {', '.join(SCOPES)}, got {unknown[0]!r:.80}")
    return tuple(scope for scope in SCOPES if scope in given)


def _check_name(what: str, name: str) -> None:
    if not 1 <= len(name) <= 128 or not name.isprintable():
        raise InvalidArgument(f"expected a {what} of 1 to 128 characters that can be printed, got {name!r:.80}")


def _held(store: Store, path: Path) -> StoredToken | None:
    """The token of this service that the file holds. Raises InvalidArgument for a file of another kind."""
    from tsemon_server.access.tokens import is_secret_of, parts_of

    try:
        text = path.read_bytes()[:1000].decode("latin-1").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidArgument(f"expected a file that can be read and written, got {path}: {error.strerror}") from None
    parts = parts_of(text)
    if text and parts is None:
        raise InvalidArgument(f"expected no file yet, or one that holds a token, got {path}, which is left as it is")
    token = None if parts is None else store.tokens.find(parts[0])
    return token if token is not None and parts is not None and is_secret_of(parts[1], token.digest) else None


def _hide(path: Path) -> None:
    """From others than its owner."""
    with suppress(PermissionError):  # it is another's
        path.chmod(0o600)


def _write(path: Path, text: str) -> None:
    """For its owner's eyes only, from the first moment on."""
    try:
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
    except OSError as error:
        raise InvalidArgument(f"expected a file that can be written, got {path}: {error.strerror}") from None


def _state(token: StoredToken) -> str:
    import time

    if token.revoked_at is not None:
        return "revoked"
    return "expired" if token.expires_at is not None and token.expires_at.timestamp() <= time.time() else "valid"


def _described(token: StoredToken) -> dict[str, object]:
    times = ("created_at", "expires_at", "revoked_at", "last_used_at")
    return {
        **{name: getattr(token, name) for name in ("token_id", "name", "scopes", "project")},
        "state": _state(token),
        **{
            name: None if getattr(token, name) is None else getattr(token, name).isoformat(timespec="seconds")
            for name in times
        },
    }
