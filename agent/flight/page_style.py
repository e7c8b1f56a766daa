"""The style sheet of a post-mortem's page, for light and dark."""

STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --text: #1c2430; --muted: #5b6675; --line: #dfe3e9;
  --series: #2f6fde; --bad: #cf222e; --bad-soft: #fdecec; --warn: #9a6700; --warn-soft: #fff3d6;
  --good: #1a7f37; --good-soft: #e3f5e7; --cell: #b9cdf2; --info: #0b7285; --info-soft: #e0f3f6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1318; --card: #171c23; --text: #e4e8ee; --muted: #96a1b1; --line: #2a323d;
    --series: #78a6ff; --bad: #ff7b72; --bad-soft: #3a1d20; --warn: #e3b341; --warn-soft: #37301a;
    --good: #56d364; --good-soft: #16301d; --cell: #30466b; --info: #58c4d6; --info-soft: #12323a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 20px 60px; }
header, section, footer { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 18px 22px; margin-bottom: 16px; }
.kicker { margin: 0; color: var(--muted); font-size: 13px; letter-spacing: .04em; }
h1 { margin: 2px 0 12px; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 0 0 12px; font-size: 17px; }
h3 { margin: 0; font-size: 15px; }
.verdict { margin: 0 0 16px; padding: 10px 14px; border-radius: 8px; font-weight: 600;
  overflow-wrap: anywhere; }
.verdict.bad { background: var(--bad-soft); color: var(--bad); }
.verdict.good { background: var(--good-soft); color: var(--good); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
article { border-left: 3px solid var(--line); padding: 2px 0 2px 14px; margin: 0 0 16px; }
article:last-child { margin-bottom: 0; }
article.likely { border-color: var(--bad); }
article.possible { border-color: var(--warn); }
article.consequence { border-color: var(--info); }
.tag { display: inline-block; font-size: 12px; font-weight: 600; padding: 1px 8px;
  border-radius: 99px; background: var(--line); color: var(--text); vertical-align: 1px; }
.likely .tag { background: var(--bad-soft); color: var(--bad); }
.possible .tag { background: var(--warn-soft); color: var(--warn); }
.consequence .tag { background: var(--info-soft); color: var(--info); }
.place { margin: 2px 0 4px; color: var(--muted); overflow-wrap: anywhere; }
ul, ol { margin: 0; padding-left: 20px; }
article ul { list-style: none; padding: 0; }
article li { padding-left: 18px; position: relative; }
article li::before { position: absolute; left: 0; font-weight: 700; }
li.for::before { content: "+"; color: var(--good); }
li.against::before { content: "−"; color: var(--bad); }
li { overflow-wrap: anywhere; }
.muted, figcaption { color: var(--muted); }
ol + .muted { margin: 10px 0 0; }
.muted + .muted { margin: 4px 0 0; }
footer .muted { margin: 0; }
footer ul { margin-bottom: 16px; }
figure { margin: 0 0 18px; }
figure:last-child { margin-bottom: 0; }
figcaption { font-size: 13px; margin-bottom: 4px; }
figcaption strong { color: var(--text); font-size: 14px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--muted); }
.grid { stroke: var(--line); }
.left { text-anchor: end; }
.step { text-anchor: middle; }
.series { fill: none; stroke: var(--series); stroke-width: 1.6; stroke-linejoin: round; }
.dot { fill: var(--series); }
.cross { stroke: var(--bad); stroke-width: 1.6; fill: none; }
.limit { stroke: var(--warn); stroke-dasharray: 5 4; }
svg .limit-label { text-anchor: end; fill: var(--warn); }
.bad-line { stroke: var(--bad); stroke-dasharray: 2 3; }
.cell.fine, .key.fine { fill: var(--cell); background: var(--cell); }
.cell.lost, .key.lost { fill: var(--bad); background: var(--bad); }
.cell.skipped, .key.skipped { fill: var(--warn); background: var(--warn); opacity: .75; }
.cell.absent, .key.absent { fill: var(--line); background: var(--line); }
.bar.fine { fill: var(--series); }
.bar.bad { fill: var(--bad); }
svg .name { text-anchor: end; fill: var(--text);
  font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.legend { margin: 0 0 6px; font-size: 13px; color: var(--muted); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin: 0 6px 0 18px;
  vertical-align: -1px; }
.key:first-child { margin-left: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 3px 18px 3px 0; white-space: nowrap; }
.numeric th, .numeric td { text-align: right; }
.numeric th:first-child, .numeric td:first-child { text-align: left; }
.remarks th:last-child, .remarks td:last-child { text-align: left; padding-left: 6px; }
tbody tr { border-top: 1px solid var(--line); }
tr.marked td { color: var(--bad); font-weight: 600; }
@media print { body { background: #fff; } header, section { break-inside: avoid; } }
"""
