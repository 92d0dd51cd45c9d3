"""`ringstep report`: what is known of an artifact as one HTML file that asks nothing of any network.

`read.py` reads an artifact's files without trusting them, `sections.py` and `measured.py` turn them into sections of
plain figures (`parts.py`), `charts.py` draws with Bokeh, `page.py` fills the template `page.html.j2`, with `page.css`
and `page.js` inside.
"""
