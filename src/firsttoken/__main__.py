"""`python -m firsttoken` is the `firsttoken` command."""

from firsttoken.cli.main import main

if __name__ == "__main__":
    main()
