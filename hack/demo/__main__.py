"""Run the demo."""

from demo.cli import main

if __name__ == "__main__":
    main()
