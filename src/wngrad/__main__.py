"""`python -m wngrad`: the command line."""

from wngrad.cli import main

if __name__ == "__main__":
    main()
