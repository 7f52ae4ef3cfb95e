"""`python -m guard.cli` is `kvguard`."""

from guard.cli import main

if __name__ == "__main__":
    main()
