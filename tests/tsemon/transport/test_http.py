import pytest

from tsemon.errors import InvalidArgument, ServerRefused, ServerUnreachable, UnknownRun
from tsemon.transport.http import HttpDelivery
from tsemon.wire import Frame, frames_to_body

BODY = frames_to_body("rank0", 1, [Frame(seq=0, step=0, time=1.0).to_json()])


@pytest.fixture
def delivery(peer):
    delivery = HttpDelivery(peer.url, timeout_s=20)
    yield delivery
    delivery.close()


class TestHttpDelivery:
    def test_registers_sends_and_finishes_on_one_connection(self, peer, delivery, registration):
        run_id, attempt = delivery.register(registration(run="a/b ü"))
        assert attempt == 1
        peer.runs["x"] = peer.runs.pop(run_id) | {"run_id": "x"}
        assert delivery.send("x", BODY)["accepted"] == 1
        delivery.finish("x", "finished")
        assert peer.runs["x"]["state"] == "finished"
        assert len(peer.server.open_sockets) == 1

    def test_keeps_a_path_before_the_api(self, peer, registration):
        delivery = HttpDelivery(f"{peer.url}/behind/", timeout_s=20)
        peer.faults_of_register.append((404, b"nothing here", {}))
        with pytest.raises(ServerRefused, match=r"404 \(Not Found\)"):
            delivery.register(registration())
        delivery.close()
        assert peer.requests == ["POST /behind/api/v1/runs"]

    def test_sends_again_at_once_when_the_idle_connection_was_closed(self, peer, delivery, registration):
        delivery.register(registration())
        port = peer.port
        peer.stop()
        peer.start(port)
        assert delivery.register(registration()) == ("default/gpt", 1)

    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
    def test_calls_a_bad_moment_unreachable(self, peer, delivery, registration, status):
        peer.faults_of_register.append((status, {"error": "busy", "detail": "not now"}, {"Retry-After": "7"}))
        with pytest.raises(ServerUnreachable, match=rf"{status} \(busy: not now\)") as caught:
            delivery.register(registration())
        assert caught.value.retry_after_s == 7.0

    def test_understands_retry_after_as_a_date(self, peer, delivery, registration):
        header = {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}
        peer.faults_of_register.append((503, {}, header))
        with pytest.raises(ServerUnreachable) as caught:
            delivery.register(registration())
        assert caught.value.retry_after_s == 0.0

    @pytest.mark.parametrize("status", [302, 400, 401, 404, 413, 422])
    def test_tells_why_it_was_refused(self, peer, delivery, registration, status):
        answer = (status, {"error": "invalid_argument", "detail": "project is empty"}, {"Location": "http://[::1]:1/"})
        peer.faults_of_register.append(answer)
        with pytest.raises(ServerRefused, match=rf"{status} \(invalid_argument: project is empty\)") as caught:
            delivery.register(registration())
        assert caught.value.status == status

    def test_knows_a_run_that_the_service_does_not_have(self, delivery):
        with pytest.raises(UnknownRun, match="unknown_run"):
            delivery.send("nobody", BODY)

    @pytest.mark.parametrize("reply", [b"<html>log in first</html>", b"[]", b"", b'{"hello": 1}'])
    def test_does_not_take_another_server_for_the_service(self, peer, delivery, registration, reply):
        peer.faults_of_register.append((200, reply, {}))
        with pytest.raises(ServerUnreachable):
            delivery.register(registration())

    def test_reads_no_proxy_from_the_environment(self, monkeypatch, delivery, registration):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert delivery.register(registration()) == ("default/gpt", 1)

    def test_says_that_nobody_answers(self, peer, delivery, registration):
        peer.stop()
        with pytest.raises(ServerUnreachable, match=r"does not answer: .*refused"):
            delivery.register(registration())

    def test_gives_up_on_a_server_that_never_replies(self, peer, registration):
        delivery = HttpDelivery(peer.url, timeout_s=0.2)
        peer.faults_of_register.append("hang")
        with pytest.raises(ServerUnreachable, match="timed out"):
            delivery.register(registration())
        delivery.close()

    @pytest.mark.parametrize(
        "url",
        [
            "localhost:8731",
            "ftp://host",
            "http://",
            "http://user:secret@host",
            "http://host:port",
            "http://host:99999",
            "http://host?x=1",
            "http://host/a b",
            "http://host/\r\nX: y",
            "",
            None,
        ],
    )
    def test_says_what_an_address_looks_like(self, url):
        with pytest.raises(InvalidArgument, match=r"must be http\(s\)://host\[:port\]\[/path\], got"):
            HttpDelivery(url)
