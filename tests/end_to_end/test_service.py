"""The keeper as a service: the files in packaging/service are what they should be, and a keeper runs as they say.

Without systemd or a container: as another user, without capabilities, in a read-only system, in a memory cgroup.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from commands import Running
from confined import OTHER, USER, as_user, confined, memory_group
from keeping import SECONDS, until
from transfuse._tuning import DRAIN_SECONDS

pytestmark = pytest.mark.processes

SERVICE = pathlib.Path(__file__).parents[2] / "packaging" / "service"
UNIT = SERVICE / "transfuse-keeper@.service"
MANIFEST = SERVICE / "kubernetes.yaml"
HELPERS = pathlib.Path(__file__).parents[1] / "helpers"
MIB = 1 << 20
STATE, LIMIT = 32 * MIB, 768 * MIB


def unit() -> dict[str, list[str]]:
    """The settings of the unit's service, each with all its values."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def manifest() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text()))
    return found


# -------------------------------------------------------------------------------------------------------- the files


def test_the_unit_is_one_for_systemd(tmp_path: pathlib.Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # Its program is not installed here.
    text = UNIT.read_text().replace("/opt/transfuse/bin/transfuse", "/bin/true")
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / UNIT.name.replace("@", "@llama"))], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (tmp_path / "keeper.service").write_text(text)
    # The most exposed services have 10; up to 2 it calls "OK".
    judged = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(tmp_path / "keeper.service")]
    done = subprocess.run(judged, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_service_has_time_to_drain() -> None:
    settings = unit()
    drain = float(re.findall(r"--drain (\d+)", settings["ExecStart"][0])[0])
    assert drain == DRAIN_SECONDS < float(settings["TimeoutStopSec"][0])
    pod = manifest()[1]["spec"]["template"]["spec"]
    command = pod["initContainers"][0]["command"]
    assert float(command[command.index("--drain") + 1]) < pod["terminationGracePeriodSeconds"]


def test_the_manifest_is_one_for_kubernetes() -> None:
    service, job = manifest()
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (keeper,), (trainer,) = pod["initContainers"], pod["containers"]
    assert keeper["restartPolicy"] == "Always"  # Else the trainer would wait for its end.
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert service["metadata"]["name"] == pod["subdomain"]
    for one in (keeper, trainer):
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        environ = {entry["name"]: entry["value"] for entry in one["env"]}
        mounts = {entry["name"]: entry["mountPath"] for entry in one["volumeMounts"]}
        assert environ["TRANSFUSE_KEEPER_START"] == "0"
        # A directory *below* the volume, which itself is open to all.
        assert pathlib.Path(environ["TRANSFUSE_KEEPER_DIR"]).parent == pathlib.Path(mounts["keepers"])
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}


def test_every_field_of_the_manifest_fits_the_schemas_of_kubernetes() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (22 MB of schemas)")
    for one in manifest():
        for version in ("1.29", "1.33"):
            schemas.validate(one, version, strict=True)


# --------------------------------------------------------------------------------------------------- a confined keeper


@pytest.fixture
def keepers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A directory for keepers, as RuntimeDirectory= makes it."""
    made = pathlib.Path(f"/tmp/keep-service-{os.getpid()}")
    made.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(made, USER, USER)
    try:
        yield made
    finally:
        shutil.rmtree(made)


def memory_used(group: pathlib.Path) -> int:
    names = ("memory.usage_in_bytes", "memory.current")
    return int(next(group / name for name in names if (group / name).exists()).read_text())


def of_group(group: pathlib.Path) -> list[int]:
    return [int(line) for line in (group / "cgroup.procs").read_text().split()]


def test_a_keeper_as_the_unit_confines_it(keepers: pathlib.Path) -> None:
    settings = unit()
    environ = {
        "TRANSFUSE_KEEPER_DIR": str(keepers),
        "TRANSFUSE_KEEPER_START": "0",
        "TRANSFUSE_RUN": "job",
        "HOME": "/nonexistent",
        "OMP_NUM_THREADS": "1",
    }
    arguments = settings["ExecStart"][0].replace("%i", "job").split()[1:]
    with (
        memory_group(LIMIT) as group,
        Running(*arguments, under=confined(settings, keepers, group), environ=environ) as keeper,
    ):
        address = keeper.line()
        (pid,) = of_group(group)
        about = dict(line.split(":\t", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
        assert set(about["Uid"].split()) == {str(USER)}
        assert (int(about["CapEff"], 16), int(about["CapBnd"], 16), about["NoNewPrivs"]) == (0, 0, "1")
        for place in ("tmp", "var/tmp", "run"):
            with pytest.raises(OSError, match="Read-only file system"):
                pathlib.Path(f"/proc/{pid}/root/{place}/probe-{os.getpid()}").touch()
        assert pathlib.Path(f"/proc/{pid}/oom_score_adj").read_text() == f"{settings['OOMScoreAdjust'][0]}\n"
        before = memory_used(group)

        program = [sys.executable, str(HELPERS / "service_worker.py"), str(STATE)]
        with Running(under=as_user(USER), command=program, environ=environ, feeds=True) as worker:
            assert worker.line() == "begins after step 0: 0"
            assert [worker.ask("commit") for _ in range(2)] == ["committed"] * 2
            # The memory of states is the keeper's, though a worker writes it.
            assert memory_used(group) - before >= 3 * STATE
            (run,) = keepers.iterdir()
            _files_are_private(run)
            _others_get_nothing(run)
            # It serves, for which it imports torch.
            assert worker.ask(str(run)) == "fetched step 2: 2"
            # It drains. The worker trains on, with one warning, and commits when the keeper is back.
            os.kill(pid, signal.SIGTERM)
            _, err, code = keeper.end()
            assert code == 0, err
            assert "was told to end" in err
            assert [worker.ask("commit") for _ in range(2)] == ["skipped"] * 2
            assert _check(keepers).returncode == 1
            with Running(*arguments, under=confined(settings, keepers, group), environ=environ) as again:
                assert again.line() != address
                until(lambda: worker.ask("commit") == "committed")
                done = _check(keepers)
                assert done.returncode == 0, done.stderr
                _, err, code = worker.end()
                assert code == 0, err
                assert err.count("goes on without the keeper of its host, and looks for it") == 1
                assert err.count("has found the keeper of its host again") == 1
                (pid,) = of_group(group)
                os.kill(pid, signal.SIGTERM)
                _, err, code = again.end()
                assert code == 0, err


def _allowed(*sets: str) -> set[str]:
    """The system calls of these sets of systemd's, those of the sets in them included."""
    found, left, seen = set[str](), list(sets), set[str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        done = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
        words = [line.strip() for line in done.stdout.splitlines()[1:] if not line.strip().startswith("#")]
        left += [word for word in words if word.startswith("@")]
        found |= {word for word in words if not word.startswith("@")}
    return found


@pytest.mark.soak
def test_the_filter_of_system_calls_has_all_that_a_keeper_calls(keepers: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """It takes commits, saves them, serves them, for which it imports torch, and drains."""
    if missing := [name for name in ("strace", "systemd-analyze") if shutil.which(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)}")
    settings, calls, saved = unit(), tmp_path / "calls", tmp_path / "saved"
    saved.mkdir()
    assert settings["SystemCallFilter"] == ["@system-service", "~@privileged"]
    allowed = _allowed("@system-service") - _allowed("@privileged")
    environ = {
        "TRANSFUSE_KEEPER_DIR": str(keepers),
        "TRANSFUSE_KEEPER_START": "0",
        "TRANSFUSE_RUN": "job",
        "SAVED": str(saved),
        "OMP_NUM_THREADS": "1",
    }
    if os.geteuid() == 0:
        os.chown(keepers, 0, 0)
    arguments = settings["ExecStart"][0].replace("%i", "job").split()[1:]
    traced = ["strace", "-f", "-qq", "-o", str(calls)]
    program = [sys.executable, str(HELPERS / "service_worker.py"), str(MIB)]
    with (
        Running(*arguments, under=traced, environ=environ) as keeper,
        Running(command=program, environ=environ, feeds=True) as worker,
    ):
        assert worker.line() == "begins after step 0: 0"
        assert [worker.ask("commit") for _ in range(2)] == ["committed"] * 2
        until(lambda: list(saved.glob("step-2-gen-*/step.json")))
        (run,) = keepers.iterdir()
        assert worker.ask(str(run)) == "fetched step 2: 2"
        os.kill(int((run / "lock").read_text()), signal.SIGTERM)
        _, err, code = keeper.end()
        assert code == 0, err
        worker.end()
    called = set(re.findall(r"^\d+ +(\w+)\(", calls.read_text(), re.MULTILINE))
    assert {"fsync", "memfd_create", "accept4", "futex"} <= called
    assert called - allowed == set()


@pytest.fixture
def volume() -> Iterator[pathlib.Path]:
    """A volume of a pod, as kubelet makes it: open to all."""
    made = pathlib.Path(f"/tmp/keep-volume-{os.getpid()}")
    made.mkdir()
    made.chmod(0o777)
    try:
        yield made
    finally:
        shutil.rmtree(made)


def test_two_containers_of_a_pod_as_the_manifest_has_them(volume: pathlib.Path) -> None:
    """Its commands, variables, user and volume; each in a namespace of pids of its own, with a read-only root."""
    pod = manifest()[1]["spec"]["template"]["spec"]
    (sidecar,), user = pod["initContainers"], pod["securityContext"]["runAsUser"]
    (mount,) = [one["mountPath"] for one in sidecar["volumeMounts"] if one["name"] == "keepers"]
    environ = {entry["name"]: entry["value"].replace(mount, str(volume)) for entry in sidecar["env"]}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    container = ["unshare", "--pid", "--fork", "--kill-child", *as_user(user, writable=[volume], read_only=True)]
    program = [sys.executable, str(HELPERS / "service_worker.py"), str(MIB)]

    def inside(container: Running) -> int:
        (pid,) = [pid for pid, line in container.alive().items() if not line.startswith("unshare")]
        return pid

    def probe() -> int:
        command = [sys.executable, "-c", "from transfuse.cli import main; main()"]
        arguments = sidecar["livenessProbe"]["exec"]["command"][1:]
        done = subprocess.run(
            as_user(user, *command, *arguments), env=os.environ | environ, capture_output=True, timeout=SECONDS
        )
        return done.returncode

    with Running(*sidecar["command"][1:], under=container, environ=environ) as keeper:
        keeper.line()
        assert stat.S_IMODE((volume / "keepers").stat().st_mode) == 0o700
        assert (volume / "keepers").stat().st_uid == user
        assert probe() == 0
        with Running(under=container, command=program, environ=environ, feeds=True) as trainer:
            assert trainer.line() == "begins after step 0: 0"
            assert [trainer.ask("commit") for _ in range(2)] == ["committed"] * 2
            # It is killed, and kubelet starts it again in the same pod.
            os.kill(inside(trainer), signal.SIGKILL)
            trainer.end()
        with Running(under=container, command=program, environ=environ, feeds=True) as trainer:
            assert trainer.line() == "begins after step 2: 2"
            assert trainer.ask("commit") == "committed"
            os.kill(inside(keeper), signal.SIGTERM)
            _, err, code = keeper.end()
            assert code == 0, err
            assert "was told to end" in err
            assert probe() == 1
            assert trainer.ask("commit") == "skipped"
            trainer.end()


def _check(keepers: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """What the probes of the manifest run."""
    command = manifest()[1]["spec"]["template"]["spec"]["initContainers"][0]["livenessProbe"]["exec"]["command"]
    program = [sys.executable, "-c", "from transfuse.cli import main; main()", *command[1:]]
    environ = os.environ | {"TRANSFUSE_KEEPER_DIR": str(keepers), "TRANSFUSE_RUN": "job", "HOME": "/nonexistent"}
    return subprocess.run(as_user(USER, *program), env=environ, capture_output=True, text=True, timeout=SECONDS)


def _files_are_private(run: pathlib.Path) -> None:
    for path in (run.parent, run):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((run / "token").stat().st_mode) == 0o600
    assert {path.stat().st_uid for path in (run.parent, run, *run.iterdir())} == {USER}


#: What another user tries. It prints what came of each.
ATTEMPTS = """
import os, socket, struct, sys
run = sys.argv[1]
def attempt(name, act):
    try:
        print(name, act())
    except OSError as error:
        print(name, type(error).__name__)
def connect():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(run + "/socket")
        body = b"\\x91\\xa6Status"
        sock.sendall(struct.pack("<II", len(body), 0) + body)
        return len(sock.recv(1))
attempt("list", lambda: os.listdir(run))
attempt("token", lambda: open(run + "/token").read())
attempt("connect", connect)
attempt("memory", lambda: open(f"/proc/{sys.argv[2]}/mem", "rb").read(1))
attempt("descriptors", lambda: os.listdir(f"/proc/{sys.argv[2]}/fd"))
"""


def _others_get_nothing(run: pathlib.Path) -> None:
    pid = int((run / "lock").read_text())

    def tried() -> list[str]:
        command = as_user(OTHER, sys.executable, "-c", ATTEMPTS, str(run), str(pid))
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout.splitlines()

    private = [f"{name} PermissionError" for name in ("list", "token", "connect", "memory", "descriptors")]
    assert tried() == private
    # Somebody opens the directories up, and the socket: the keeper looks who connects, and the token stays private.
    opened = {path: stat.S_IMODE(path.stat().st_mode) for path in (run.parent, run, run / "socket")}
    try:
        for path in opened:
            path.chmod(0o777)
        found = tried()
        assert found[1:] == [private[1], found[2], *private[3:]]
        # It is closed before a byte is answered.
        assert found[2] in ("connect 0", "connect ConnectionResetError", "connect BrokenPipeError")
    finally:
        for path, mode in opened.items():
            path.chmod(mode)
