"""What minipaged finds on this machine, and what to do about it (`minipaged doctor`).

One topic per file; each has functions that look at one thing and return `Finding`s. They read /proc and /sys below a
`root` that tests replace. Where a system does not tell, the finding says so; nothing is guessed.
"""
