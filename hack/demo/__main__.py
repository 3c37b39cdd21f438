"""Run the demo."""

from demo.bytecode import keep_bytecode

keep_bytecode()

from demo.cli import main  # noqa: E402  What is imported from here on is kept compiled.

if __name__ == "__main__":
    main()
