"""Fuzz the decoders: ``python -m fuzz offer --seconds 60``, or ``all`` for each in turn.

A finding ends it with a traceback, exit code 77 and a file ``crash-…`` in ``--findings``; run that again with
``--reproduce FILE``.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import resource
import subprocess
import sys
import tempfile

MIB = 1 << 20
NAMES = (
    "header",
    "record",
    "body",
    "numbers",
    "tree",
    "value",
    "offer",
    "want",
    "blocks",
    "sharding",
    "memory",
    "device",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", choices=[*NAMES, "all", "canary"])
    parser.add_argument("--seconds", type=int, default=60, help="the most seconds for each target")
    parser.add_argument("--runs", type=int, default=-1, help="the most inputs for each target")
    parser.add_argument(
        "--memory", type=int, default=1024, help="MiB that a target may take beyond what it has at first"
    )
    parser.add_argument("--corpus", type=pathlib.Path, help="keep what was found interesting here")
    parser.add_argument("--findings", type=pathlib.Path, default=pathlib.Path("fuzz-findings"))
    parser.add_argument("--reproduce", type=pathlib.Path, help="run this one input")
    parser.add_argument("--inside", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reproduce is not None:
        from fuzz.targets import TARGETS

        TARGETS[options.target](options.reproduce.read_bytes())
        print("nothing found")
        return 0
    if options.inside is not None:
        fuzz(options)
        return 0
    total, failed = 0, []
    for name in NAMES if options.target == "all" else [options.target]:
        count, code = fuzz_in_child(name)
        total += count
        failed += [name] if code else []
    print(f"{total:,} inputs in all" + (f"; found something in {', '.join(failed)}" if failed else "; nothing found"))
    return 77 if failed else 0


def fuzz_in_child(name: str) -> tuple[int, int]:
    """In a process of its own, because libFuzzer ends the process that it runs in; inputs tried, and its exit code."""
    arguments = [name if argument in (*NAMES, "all", "canary") else argument for argument in sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="fuzz") as scratch:
        command = [sys.executable, "-m", "fuzz", *arguments, f"--inside={scratch}"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    found = re.findall(r"^(?:Done|#)(?: )?(\d+)", done.stderr, re.MULTILINE)
    count = int(found[-1]) if found else 0
    print(f"{name:8} {count:>10,} inputs, {'FOUND SOMETHING' if done.returncode else 'nothing found'}", flush=True)
    if done.returncode:
        print(done.stderr[-6000:])
    return count, done.returncode


def fuzz(options: argparse.Namespace) -> None:
    import atheris
    import torch  # noqa: F401 - first, so that its own code is not instrumented

    with atheris.instrument_imports(include=["transfuse"]):
        import transfuse  # noqa: F401
        from transfuse._wire import messages  # noqa: F401
    from fuzz.seeds import seeds_for
    from fuzz.targets import TARGETS, mutate

    name, run = options.target, TARGETS[options.target]
    options.findings.mkdir(parents=True, exist_ok=True)
    corpus = options.corpus / name if options.corpus else options.inside / "corpus"
    seeds = options.inside / "seeds"
    corpus.mkdir(parents=True, exist_ok=True)
    seeds.mkdir()
    for number, seed in enumerate(seeds_for(name)):
        (seeds / f"{number:04}").write_bytes(seed)
    arguments = [
        sys.argv[0], str(corpus), str(seeds), f"-max_total_time={options.seconds}", f"-runs={options.runs}",
        "-max_len=20000", "-len_control=0", "-timeout=20", "-rss_limit_mb=0",
        f"-artifact_prefix={options.findings}/{name}-",
    ]  # fmt: skip

    def custom(data: bytes, max_size: int, seed: int) -> bytes:
        return mutate(name, data, lambda plain: atheris.Mutate(plain, max_size), seed)[:max_size]

    atheris.Setup(arguments, run, custom_mutator=custom)
    limit_memory(options.memory * MIB)
    atheris.Fuzz()


def limit_memory(more: int) -> None:
    """An allocation beyond this fails, and so is found."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    sys.exit(main())
