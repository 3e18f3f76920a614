"""``python -m benchmarks.compare``. Workers import this file too, but only the parent needs the command's packages."""

if __name__ == "__main__":
    from transfuse.cli import run

    run("benchmarks.compare.command", "python -m benchmarks.compare")
