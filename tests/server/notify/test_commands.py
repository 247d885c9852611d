"""`tsemon notify`: trying receivers, and what they were sent."""

import json

import pytest
from typer.testing import CliRunner

from tests.server.notify.receivers import await_that
from tsemon.errors import InvalidArgument, InvalidDocument
from tsemon.tools.cli import app


def notify(*arguments):
    """Exit code and output of a command; errors are raised."""
    done = CliRunner().invoke(app, ["notify", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.fixture
def file(tmp_path, http, mailbox):
    path = tmp_path / "notify.yaml"
    path.write_text(
        "base_url: http://gpu1:8731\nreceivers:\n"
        f"  - {{name: hook, type: webhook, url: '{http.url}/secret', allow_private: true}}\n"
        f"  - {{name: mail, type: email, host: 127.0.0.1, port: {mailbox.port}, security: none, from: a@example.org,\n"
        "     to: b@example.org, allow_private: true}\n"
    )
    return path


class TestTheTest:
    def test_sends_to_all_receivers_what_says_that_it_is_one(self, file, http, mailbox):
        assert notify("test", "--config", file) == (0, "hook: answered 200\nmail: took the mail\n")
        assert http.requests[0].json["title"] == "notify-test fires in test/test at step 0"
        assert "nothing is wrong" in http.requests[0].json["text"]
        assert mailbox.mails[0][2]["Subject"] == "[info] notify-test fires in test/test at step 0"

    def test_sends_to_one(self, file, http, mailbox):
        assert notify("test", "mail", "--config", file) == (0, "mail: took the mail\n")
        assert http.requests == []

    def test_tells_what_came_back(self, file, http):
        http.answers = [403]
        assert notify("test", "hook", "--config", file) == (1, "hook: not delivered: answered 403\n")

    def test_tells_it_to_a_script(self, file, http):
        http.answers = [403]
        code, shown = notify("test", "--config", file, "--json")
        assert code == 1
        assert json.loads(shown) == [
            {"receiver": "hook", "delivered": False, "told": "answered 403"},
            {"receiver": "mail", "delivered": True, "told": "took the mail"},
        ]

    def test_names_the_receivers_there_are(self, file):
        with pytest.raises(InvalidArgument, match="expected one of the receivers hook, mail, got 'nobody'"):
            notify("test", "nobody", "--config", file)

    def test_tells_the_line_that_is_wrong(self, file):
        file.write_text(file.read_text().replace("type: webhook", "type: hook"))
        with pytest.raises(InvalidDocument, match=r"notify\.yaml line 3: "):
            notify("test", "--config", file)


class TestTheLog:
    @pytest.fixture
    def filled(self, store, alerts, start, configure, http):
        http.answers = [422]
        where = f"type: webhook, url: '{http.url}/secret', allow_private: true"
        start(configure(f"group_wait: 0s\nreceivers: [{{name: hook, {where}}}]"))
        alerts.fire("gpt")
        await_that(lambda: [found.status for found in store.notices.log()] == ["failed"], "it was given up")
        return store

    def test_is_shown_a_line_each(self, filled, database):
        code, shown = notify("log", "--database", database.url)
        assert code == 0
        assert shown == "2027-01-15 08:00:00 hook: failed: loss-spike firing default/gpt (answered 422)\n"

    def test_is_shown_with_all_that_is_known(self, filled, database):
        _, shown = notify("log", "--json", "--receiver", "hook", "--database", database.url)
        (found,) = json.loads(shown)
        assert (found["receiver"], found["status"], found["error"]) == ("hook", "failed", "answered 422")
        assert notify("log", "--receiver", "other", "--database", database.url) == (0, "")
