"""The downloader against a server on this machine: good files, wrong ones, broken ones, none at all."""

import gzip
import hashlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from straightdp.data import catalogue, download
from straightdp.data.catalogue import File
from straightdp.errors import BadInput

CONTENT = bytes(range(256)) * 800
LABELS = b"labels " * 300
BODIES = {
    "/good.gz": gzip.compress(CONTENT, 1),
    "/labels.bin": LABELS,
    "/wrong.gz": gzip.compress(CONTENT[:-1] + b"?"),
    "/notgzip.gz": b"<html>sign in first</html>",
    "/bomb.gz": gzip.compress(bytes(20_000_000)),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        cut = self.path.startswith("/cut")
        body = BODIES.get(self.path.removeprefix("/cut"))
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        if not self.path.startswith("/unsized"):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
    thread.join(timeout=5)


@pytest.fixture
def offer(monkeypatch):
    """Put one set called `toy` into the catalogue."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "TIMEOUT", 5.0)

    def put(*urls: str):
        monkeypatch.setitem(catalogue.CATALOGUE, "toy", tuple(entry(url) for url in urls))

    return put


def entry(url: str) -> File:
    name = url.rsplit("/", 1)[1]
    if name == "labels.bin":
        return File(name, url, len(LABELS), f"sha256:{hashlib.sha256(LABELS).hexdigest()}")
    return File(name, url, len(CONTENT), f"md5:{hashlib.md5(CONTENT).hexdigest()}", gunzip=True)


def refusal(root, *expected) -> None:
    """`get` refuses in one sentence, and leaves no file of its own behind."""
    before = sorted(path for path in root.rglob("*") if path.is_file())
    with pytest.raises(BadInput) as caught:
        download.get("toy", root)
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert str(part) in message, message
    assert sorted(path for path in root.rglob("*") if path.is_file()) == before


def test_files_are_fetched_checked_and_not_fetched_twice(server, offer, tmp_path, capsys):
    offer(f"{server}/good.gz", f"{server}/labels.bin")
    assert download.check("toy", tmp_path) == [("good.gz", "missing"), ("labels.bin", "missing")]
    assert download.get("toy", tmp_path) == [("good.gz", "fetched"), ("labels.bin", "fetched")]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("good.gz: 0% of")
    assert any(line.startswith("labels.bin: 100%") for line in lines)
    assert (tmp_path / "toy" / "good.gz").read_bytes() == BODIES["/good.gz"]
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == ["good.gz", "labels.bin"]
    assert download.check("toy", tmp_path) == [("good.gz", "ok"), ("labels.bin", "ok")]
    offer("http://127.0.0.1:1/good.gz", "http://127.0.0.1:1/labels.bin")
    assert {status for _, status in download.get("toy", tmp_path)} == {"already there"}


def test_progress_is_reported_to_who_asks(server, offer, tmp_path, capsys):
    offer(f"{server}/good.gz")
    seen = []
    download.get("toy", tmp_path, progress=lambda *report: seen.append(report))
    size = len(BODIES["/good.gz"])
    assert seen[0] == ("good.gz", 0, size)
    assert seen[-1] == ("good.gz", size, size)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(server, offer, tmp_path, monkeypatch, capsys):
    offer(f"{server}/good.gz")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert download.get("toy", tmp_path) == [("good.gz", "fetched")]
    assert "good.gz" in capsys.readouterr().err


def test_any_gzip_of_the_content_passes_and_the_bare_content_too(offer, tmp_path):
    offer("http://127.0.0.1:1/good.gz")
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "good.gz").write_bytes(gzip.compress(CONTENT, 9, mtime=7))
    assert download.check("toy", tmp_path) == [("good.gz", "ok")]
    (folder / "good.gz").unlink()
    (folder / "good").write_bytes(CONTENT)
    assert download.check("toy", tmp_path) == [("good.gz", "ok")]
    (folder / "good").write_bytes(CONTENT[:-1])
    assert download.check("toy", tmp_path) == [("good.gz", "wrong content")]


def test_a_wrong_file_that_is_there_is_replaced(server, offer, tmp_path):
    offer(f"{server}/labels.bin")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "labels.bin").write_bytes(b"old")
    assert download.check("toy", tmp_path) == [("labels.bin", "wrong content")]
    assert download.get("toy", tmp_path) == [("labels.bin", "replaced")]
    assert (tmp_path / "toy" / "labels.bin").read_bytes() == LABELS


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("wrong.gz", "but gave md5:"),
        ("notgzip.gz", "but gave only 26 bytes"),
        ("bomb.gz", "more than 204,800 bytes"),
    ],
)
def test_wrong_content_is_refused_and_what_was_there_stays(server, offer, tmp_path, path, expected):
    offer(f"{server}/{path}")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / path).write_bytes(b"mine")
    digest = hashlib.md5(CONTENT).hexdigest()
    refusal(tmp_path, f"{server}/{path}", digest, expected, "straightdp data check toy")
    assert (tmp_path / "toy" / path).read_bytes() == b"mine"


def test_a_body_cut_short_is_refused(server, offer, tmp_path):
    offer(f"{server}/cut/good.gz")
    refusal(tmp_path, "broke off before the end", tmp_path / "toy" / "good.gz")


def test_a_missing_page_is_refused(server, offer, tmp_path):
    offer(f"{server}/nothing.gz")
    refusal(tmp_path, "answered 404", f"{server}/nothing.gz")


def test_without_network_the_sentence_says_how_to_do_it_by_hand(offer, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/good.gz"
    offer(url)
    target = tmp_path / "toy" / "good.gz"
    refusal(tmp_path, url, "refused", f"put it at {target}", "straightdp data check toy")


def test_a_folder_that_cannot_be_made_is_refused(server, offer, tmp_path):
    offer(f"{server}/good.gz")
    (tmp_path / "toy").write_text("a file where the folder should be")
    refusal(tmp_path, "could not be written", "STRAIGHTDP_DATA")


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(BadInput, match="did you mean 'kmnist'"):
        download.get("kmist", tmp_path)
    with pytest.raises(BadInput, match="choose one of mnist, fashion-mnist, kmnist"):
        download.check("zzz", tmp_path)


def test_a_split_means_its_set(tmp_path):
    assert download.check("mnist:train", tmp_path) == download.check("mnist", tmp_path)


def test_the_catalogue_is_well_formed():
    for files in catalogue.CATALOGUE.values():
        assert len({file.name for file in files}) == len(files)
        for file in files:
            algorithm, _, digest = file.digest.partition(":")
            assert len(digest) == 2 * hashlib.new(algorithm).digest_size
            assert file.url.startswith("http")
            assert file.url.endswith("/" + file.name)
