"""`python -m minipaged`."""

from minipaged.cli.main import main

if __name__ == "__main__":
    main()
