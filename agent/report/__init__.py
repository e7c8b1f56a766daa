"""What every tool shows its findings with: numbers, a terminal, JSON and pages.

`numbers` writes values with their units. `content` is what a report shows, tables and plots, and
its JSON: `terminal` prints it, `page` makes one HTML file of it by a template in `assets`.
`options` are those of the commands that report.
"""
