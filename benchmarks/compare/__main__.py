"""``python -m benchmarks.compare``. Only the parent needs the command's packages: workers import this file as well."""

if __name__ == "__main__":
    from transfuse.cli import run

    run("benchmarks.compare.command", "python -m benchmarks.compare")
