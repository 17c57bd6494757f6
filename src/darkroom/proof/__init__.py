"""The published systems, retold: their tables, how they were run, and how near the plan comes to them.

`tables` holds the rows and what the peers' software computes, `published_runs` how each was run, `published`
compares, and `page` writes the five-systems page with `drawings`. Nothing but the command line imports this
package.
"""
