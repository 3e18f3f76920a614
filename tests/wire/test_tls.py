"""What ``transfuse.TLS`` takes, which names it accepts, and what the environment says."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path

import pytest

import transfuse
from certificates import certificate, directory, environment_of, tls
from transfuse._tls import TLS, accepts, credentials, tls_of


@pytest.mark.parametrize(
    ("name", "kind", "found", "fits"),
    [
        ("trainer.example", "DNS", "trainer.example", True),
        ("Trainer.Example", "DNS", "trainer.example.", True),
        ("trainer.example", "DNS", "other.example", False),
        ("trainer.example", "URI", "trainer.example", False),
        ("*.train.example", "DNS", "host-1.train.example", True),
        ("*.train.example", "DNS", "*.train.example", True),
        ("*.train.example", "DNS", "a.b.train.example", False),
        ("*.train.example", "DNS", "train.example", False),
        ("*.train.example", "DNS", ".train.example", False),
        ("10.0.0.7", "IP Address", "10.0.0.7", True),
        ("::1", "IP Address", "0:0:0:0:0:0:0:1", True),
        ("10.0.0.7", "DNS", "10.0.0.7", False),
        ("spiffe://c/ns/train", "URI", "spiffe://c/ns/train", True),
        ("spiffe://c/ns/train", "URI", "spiffe://c/ns/train/sa/x", False),
        ("spiffe://c/ns/train/*", "URI", "spiffe://c/ns/train/sa/x", True),
        ("spiffe://c/ns/train/*", "URI", "spiffe://c/ns/train/", False),
        ("spiffe://c/ns/train/*", "URI", "spiffe://c/ns/trainer/x", False),
        ("spiffe://c/ns/train", "DNS", "spiffe://c/ns/train", False),
        ("*", "DNS", "anything", False),
    ],
)
def test_which_names_stand_for_which(name: str, kind: str, found: str, fits: bool) -> None:
    assert accepts([name], [(kind, found)]) is fits
    assert accepts(["no-such-name", name], [("DNS", "another"), (kind, found)]) is fits
    assert not accepts([name], [])


def test_without_names_those_of_ones_own_certificate_count() -> None:
    """Of an expired one, too: whether that is accepted is for the others to say."""
    for days in (2, -1):
        assert credentials(tls(days=days)).names == ("spiffe://tests/job", "localhost", "127.0.0.1")
    assert credentials(tls(accepts=["a", "b"])).names == ("a", "b")
    assert credentials(tls("", accepts=["a"])).names == ("a",)
    with pytest.raises(ValueError, match="has no subject alternative names that peers could share: pass names="):
        credentials(tls(""))


def test_it_is_names_of_files_that_can_be_compared_and_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = TLS("a.pem", Path("a.key"), b"ca.pem".decode(), names="job")
    assert given == TLS(tmp_path / "a.pem", tmp_path / "a.key", tmp_path / "ca.pem", names=["job"])
    assert len({given, pickle.loads(pickle.dumps(given))}) == 1
    assert transfuse.TLS is TLS
    with pytest.raises(TypeError, match="key takes the name of a file, got None"):
        TLS("a", None, "c")  # type: ignore[arg-type]
    for names in ([""], [" a"], [3], []):
        with pytest.raises(ValueError, match="TLS: names"):
            TLS("a", "b", "c", names=names)  # type: ignore[arg-type]


def test_a_key_with_a_password_is_refused_and_asks_nobody(tmp_path: Path) -> None:
    good, key = certificate()
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ValueError, match="has a password: give one without"):
        credentials(TLS(good, locked, directory() / "ca.pem"))


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tls(accepts=["a", "*.b"])
    assert tls_of(None) is None
    for name, value in environment_of(given).items():
        monkeypatch.setenv(name, value)
    assert tls_of(None) == given
    assert tls_of(False) is None
    assert tls_of(tls()) == tls()
    monkeypatch.setenv("TRANSFUSE_TLS_KEY", "")
    with pytest.raises(ValueError, match="needs all of TRANSFUSE_TLS_CERT, _KEY and _CA, and TRANSFUSE_TLS_KEY is not"):
        tls_of(None)
