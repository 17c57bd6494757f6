"""The published systems, retold: their tables, how they were run, and how near the plan comes to them.

`tables` holds the rows, `published*` how each was run, `peers` their software, `validate` compares, and
`page` writes the five-systems page with `drawings`. Nothing but the command line imports this package.
"""
