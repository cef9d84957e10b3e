"""Which figure of "When Attention Sink Emerges in Language Models" a figure of the page is."""

# By names of figures, in the paper's order; a number is of arXiv 2410.10781v1, where it is known.
PAPER_FIGURES = {
    'norm': ('Hidden states', ''),
    'key': ('Keys', ''),
    'value': ('Values', ''),
    'cos': ('Queries and keys', ''),
    'attention': ('Attention patterns', ''),
    'alpha': ('Layers and heads', ''),
    'curves': ('Emergence', 'Figure 2A'),
    'along-optimizer.peak_learning_rate': ('Learning rate', 'Figure 2B'),
    'along-data.share': ('Amount of data', 'Figure 2C'),
    'along-optimizer.weight_decay': ('Weight decay', 'Table 1'),
    'along-model.mask.window': ('Window', 'Figure 2D'),
    'along-model.mask.prefix': ('Prefix', 'Figure 3B'),
    'along-optimizer.batch_size': ('Batch', 'Table 6'),
    'along-model.heads': ('Heads', 'Table 9'),
    'along-model.columns.value_norm': ('Norm of a fixed value', 'Table 10'),
    'along-model.attention.gain': ('Gain', 'Table 12'),
}


def sort_like_paper(figures: list[dict]) -> list[dict]:
    """The paper's first, in its order and by its numbers; then the others."""
    positions = {name: position for position, name in enumerate(PAPER_FIGURES)}
    sorted_figures = sorted(figures, key=lambda figure: positions.get(figure['name'], len(PAPER_FIGURES)))
    return [dict(figure, title=make_paper_title(figure)) for figure in sorted_figures]


def make_paper_title(figure: dict) -> str:
    words, number = PAPER_FIGURES.get(figure['name'], ('', ''))
    if not number:
        return figure['title']
    return f'{number}. {words}' + ('' if figure['name'].startswith('along-') else f': {figure["title"]}')
