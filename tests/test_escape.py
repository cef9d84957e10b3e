"""Names with special characters in tables, pages, figures, LaTeX, Markdown and paths."""

import glob
import html
import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from synthetic_runs import write_run

from sinklab import escape
from sinklab.cli import progress, report, terminal
from sinklab.report import figures, page, run_groups, runs, summary_table
from sinklab.sweep import plan

NAMES = [
    '[bold]',
    '[/]',
    ':x:',
    '$',
    '$x$',
    '$\\frac$',
    '<b',
    '&amp;',
    '_x',
    'a_b',
    '%',
    '#',
    '\\',
    '{',
    '^',
    '~',
    '|',
]
NAMES += ['..', '.x', '-rf', '../x', 'a/b', 'a%2Fb', '*x', '[a]', 'two words', 'ü', '日本', '5']


@pytest.fixture(scope='module')
def named_runs(tmp_path_factory):
    """Make one run for each name."""
    folder = tmp_path_factory.mktemp('named')
    return runs.read_runs([write_run(folder / str(index), name, steps=(0, 10)) for index, name in enumerate(NAMES)])


def read_first_column(text):
    """Return the first column of tables that are printed without borders."""
    return [line[1:].split('  ')[0].rstrip() for line in text.splitlines()]


def test_report_shows_names_as_they_are(named_runs, capsys):
    report.print_runs(list(map(summary_table.make_run_row, named_runs)))
    assert {*NAMES} <= {*read_first_column(capsys.readouterr().out)}


def test_table_heading_and_progress_show_names_as_they_are(capsys):
    for name in NAMES:
        terminal.print_table(terminal.make_console(width=100), [name], [['x']])
        assert capsys.readouterr().out.splitlines()[0].strip() == name
        progress.ProgressCallback(name, 8).on_message(f'note of {name}')
        assert capsys.readouterr().err == f'{name}  note of {name}\n'


@pytest.mark.slow
def test_report_page_escapes_html_in_names(named_runs, tmp_path):
    page.write_report_page(tmp_path / 'report.html', named_runs)
    text = (tmp_path / 'report.html').read_text(encoding='utf-8').partition('<script')[0]
    headings = re.findall(r'<th scope="row">(.*?)</th>', text)
    assert sorted(headings) == sorted(map(html.escape, [*NAMES, *NAMES]))  # by row and by run


@pytest.mark.slow
def test_figures_draw_names_literally(named_runs):
    pytest.importorskip('matplotlib')
    from matplotlib import pyplot as plt

    from sinklab.report import pictures

    with warnings.catch_warnings(), plt.rc_context(escape.FIGURE_RC_PARAMS):
        warnings.filterwarnings('error')
        warnings.filterwarnings('ignore', 'Glyph|.*layout not applied')
        groups = run_groups.group_runs(named_runs)[:12]
        figure = pictures.draw_lines(figures.make_sink_and_loss_figure(groups), groups)
        figure.canvas.draw()
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [group.name for group in groups]
        plt.close(figure)


@given(st.text(alphabet='\\|<&#;/!bx1 '))
def test_escape_markdown_keeps_special_characters_in_table_cell(text):
    table = f'| a | b | c |\n|---|---|---|\n| 1 | {escape.escape_markdown(text)} | 3 |\n'
    cells = re.findall('<td>(.*?)</td>', MarkdownIt('commonmark').enable('table').render(table))
    assert cells == ['1', html.escape(text.strip()), '3']


@pytest.mark.parametrize('name', [*NAMES, 'x\ny'])
def test_run_dir_name_is_single_visible_folder_below_sweep(tmp_path, name):
    folder = tmp_path / plan.get_run_dir_name(name, 3)
    folder.mkdir()
    assert glob.glob('*', root_dir=tmp_path) == [folder.name]
    assert folder.name.endswith('-3')


def test_run_dir_names_of_different_rows_differ():
    assert len({plan.get_run_dir_name(name, 3) for name in NAMES}) == len(NAMES)
