import os
import ssl
import subprocess
import threading

import pytest

from tsemon.errors import InvalidArgument, ServerRefused, ServerUnreachable, UnknownRun
from tsemon.transport import Outbox, Spool
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
        run_id, attempt, *_ = delivery.register(registration(run="a/b ü"))
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
        assert delivery.register(registration())[:2] == ("default/gpt", 1)

    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
    def test_calls_a_bad_moment_unreachable(self, peer, delivery, registration, status):
        peer.faults_of_register.append((status, {"error": "busy", "detail": "not now"}, {"Retry-After": "7"}))
        with pytest.raises(ServerUnreachable, match=rf"{status} \(busy: not now\)") as caught:
            delivery.register(registration())
        assert caught.value.retry_after_s == 7.0

    @pytest.mark.parametrize(
        ("date", "seconds"),
        [
            ("Wed, 21 Oct 2015 07:27:18 GMT", 42.0),
            ("Wed, 21 Oct 2015 07:29:00 GMT", 0.0),
            ("Wed, 21 Oct 2015 09:27:50 +0200", 10.0),
            ("soon", None),
        ],
    )
    def test_reads_a_date_to_retry_after_by_the_clock_of_the_service(self, peer, delivery, registration, date, seconds):
        peer.date = date
        peer.faults_of_register.append((503, {}, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}))
        with pytest.raises(ServerUnreachable) as caught:
            delivery.register(registration())
        assert caught.value.retry_after_s == seconds

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
        assert delivery.register(registration())[:2] == ("default/gpt", 1)

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

    def test_does_not_show_the_password_in_an_address(self):
        with pytest.raises(InvalidArgument, match=r"got 'http://\.\.\.@gpu1:8731'"):
            HttpDelivery("http://ann:secret@gpu1:8731")


TOKEN = "tsm_17_kB3vQe9w"


class TestATokenInTheEnvironment:
    @pytest.fixture(autouse=True)
    def token(self, monkeypatch):
        monkeypatch.setenv("TSEMON_TOKEN", f" {TOKEN}\n")

    def test_goes_into_a_header_of_every_request(self, peer, registration):
        delivery = HttpDelivery(peer.url)
        run_id, _, *_ = delivery.register(registration())
        delivery.send(run_id, BODY)
        delivery.beat(run_id, writer="rank0", attempt=1, step=0)
        delivery.has_frames("default", "gpt")
        delivery.finish(run_id, "finished")
        delivery.close()
        assert [headers["Authorization"] for headers in peer.headers] == [f"Bearer {TOKEN}"] * 5

    def test_is_in_no_url_body_error_file_or_repr(self, peer, tmp_path, registration, sample):
        peer.faults_of_register.append((401, {"error": "unauthorized", "detail": f"who is {TOKEN}?"}, {}))
        peer.faults.append((200, {"accepted": TOKEN}, {}))
        peer.is_refused = lambda frame: frame["step"] == 1
        peer.refuse_with = (422, {"error": "invalid_frame", "detail": f"not from {TOKEN}"}, {})
        spool = Spool.create(tmp_path, registration(), "rank0")
        delivery, told = HttpDelivery(peer.url), []
        outbox = Outbox(spool, delivery, on_warning=told.append, first_retry_s=0.01)
        for step in range(3):
            outbox.put(sample(step))
        peer.wait_until(lambda: peer.seqs() == [0, 2])
        outbox.close(20)
        assert [text for text in told if "unauthorized: who is <token>?" in text]
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] != []
        texts = [*told, *peer.requests, repr(delivery), repr(outbox), repr(outbox.stats())]
        texts += [body.decode() for body in peer.bodies]
        texts += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
        assert [text for text in texts if TOKEN in text] == []

    @pytest.mark.parametrize("wrong", ["two words", "a\r\nX: y", "schlüssel"])
    def test_that_is_none_is_said_without_showing_it(self, peer, monkeypatch, wrong):
        monkeypatch.setenv("TSEMON_TOKEN", wrong)
        with pytest.raises(InvalidArgument, match="TSEMON_TOKEN is a token on one line") as caught:
            HttpDelivery(peer.url)
        assert wrong not in str(caught.value)


@pytest.fixture(scope="module")
def make_certificate(tmp_path_factory):
    """A key and a certificate that nobody has signed but itself, for one address, in one file."""

    def of(address):
        folder = tmp_path_factory.mktemp("tls")
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", "/CN=tsemon", "-addext", f"subjectAltName=IP:{address}"]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        return key, certificate

    return of


class TestHttps:
    def serve(self, peer, key, certificate):
        peer.stop()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        peer.start(tls=context)

    def test_delivers_nothing_to_who_cannot_prove_who_it_is(self, peer, registration, make_certificate):
        self.serve(peer, *make_certificate("127.0.0.1"))
        delivery = HttpDelivery(peer.url, timeout_s=20)
        with pytest.raises(
            ServerUnreachable, match=r"certificate that is not trusted \(self.signed.* in SSL_CERT_FILE"
        ):
            delivery.register(registration())
        assert peer.requests == []

    def test_delivers_where_the_certificate_is_trusted(self, peer, registration, make_certificate, monkeypatch):
        key, certificate = make_certificate("127.0.0.1")
        self.serve(peer, key, certificate)
        monkeypatch.setenv("SSL_CERT_FILE", os.fspath(certificate))
        delivery = HttpDelivery(peer.url, timeout_s=20)
        run_id, _, *_ = delivery.register(registration())
        assert delivery.send(run_id, BODY)["accepted"] == 1
        assert len(peer.server.open_sockets) == 1
        delivery.close()

    def test_delivers_nothing_where_the_certificate_is_of_another(
        self, peer, registration, make_certificate, monkeypatch
    ):
        key, certificate = make_certificate("127.0.0.2")
        self.serve(peer, key, certificate)
        monkeypatch.setenv("SSL_CERT_FILE", os.fspath(certificate))
        with pytest.raises(ServerUnreachable, match=r"not trusted .*IP address mismatch"):
            HttpDelivery(peer.url, timeout_s=20).register(registration())
        assert peer.requests == []

    def test_is_ended_by_abort_while_the_service_hangs(self, peer, registration, make_certificate, monkeypatch):
        key, certificate = make_certificate("127.0.0.1")
        self.serve(peer, key, certificate)
        monkeypatch.setenv("SSL_CERT_FILE", os.fspath(certificate))
        delivery, ended = HttpDelivery(peer.url, timeout_s=600), []
        peer.faults_of_register.append("hang")

        def register():
            try:
                delivery.register(registration())
            except ServerUnreachable as error:
                ended.append(error)

        thread = threading.Thread(target=register)
        thread.start()
        peer.wait_until(lambda: peer.requests)
        delivery.abort()
        thread.join(20)
        assert len(ended) == 1
