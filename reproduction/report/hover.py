"""Figures that can be read by hovering: plotly's, kept beside the static drawing whose place they
take where scripts run.

plotly.js is copied into the site once, from the installed package (book/_ext/selfcontained.py);
book/_static/hover.js loads it on the pages that have such a figure. Without scripts the static
drawing stays.
"""

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from reproduction.report.markup import PageOutput

if TYPE_CHECKING:
    import plotly.graph_objects as go

INK, GRID = "#333333", "#dddddd"


def hovering(figures: Mapping[str, "go.Figure"]) -> PageOutput:
    """Figures as data for the page, by the name of the static figure that each replaces; nothing to
    see in a terminal.
    """
    data = (
        f'<script type="application/json" class="fc-hover" data-for="{escape(name)}">{_json(figure)}</script>'
        for name, figure in figures.items()
    )
    return PageOutput("".join(data), text=f"{len(figures)} figures, to be read by hovering")


def _json(figure: "go.Figure") -> str:
    """The figure in the report's look; the same bytes for the same figure."""
    axis = {
        "gridcolor": GRID,
        "linecolor": INK,
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
    }
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0}
    look = {
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {"family": "sans-serif", "size": 13, "color": INK},
    }
    figure.update_layout(template=None, legend=legend, hovermode="closest", dragmode=False, **look)
    edges = {side: 10 for side in "lrbt" if figure.layout.margin[side] is None}
    figure.update_layout(margin=edges).update_xaxes(**axis, exponentformat="power").update_yaxes(
        **axis
    )
    return figure.to_json(engine="json").replace("</", "<\\/")
