"""``python -m examples.demo``. Workers import this file too, but only the parent needs the command's packages."""

if __name__ == "__main__":
    from transfuse.cli import run

    run("examples.demo.command", "python -m examples.demo")
