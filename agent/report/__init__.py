"""What every tool shows its findings with: numbers, a terminal, JSON and pages.

`numbers` writes values with their units, `terminal` has the tables, `document` writes JSON, `plots`
says what is drawn, and `page` makes one HTML file of a template in `assets`.
"""
