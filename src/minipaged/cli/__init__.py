"""The `minipaged` command. Each command is one file; heavy libraries are imported by the command that uses them."""
