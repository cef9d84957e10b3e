"""Tests of names with special characters in terminals, pages, figures, tables and paths."""

import base64
import glob
import gzip
import io
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from html.parser import HTMLParser

import pytest
from conftest import make_tiny_spec
from hostile_names import HOSTILE_NAMES, escape_name
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.text import Text
from synthetic_runs import write_run

from sinklab import escape, standard_streams
from sinklab.cli import measure, progress, report, sweep, terminal
from sinklab.cli.main import main
from sinklab.config.spec import Hardware
from sinklab.errors import UserError
from sinklab.report import claims, latex, page, run_groups, runs, summary_table
from sinklab.resume_checks import check_run_dir
from sinklab.run_dir import RunDir
from sinklab.storage.paths import check_utf8
from sinklab.sweep import plan
from sinklab.sweep.run import SignalForwarder

SHORT_NAMES = [name for name in HOSTILE_NAMES if len(name) < 40]


@pytest.fixture(scope='module')
def named_runs(tmp_path_factory):
    """Make one run for each name, and one whose name is a number."""
    folder = tmp_path_factory.mktemp('named')
    paths = [write_run(folder / str(index), name, steps=(0, 10)) for index, name in enumerate([*HOSTILE_NAMES, '5'])]
    return runs.read_runs(paths)


def read_first_column(text):
    """Return the first column of tables that are printed without borders."""
    return [line[1:].split('  ')[0].rstrip() for line in text.splitlines()]


@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=ascii)
def test_terminal_table_shows_escaped_name_in_cell(capsys, name):
    terminal.print_table(terminal.make_console(width=100), ['row'], [[name]])
    _, *lines = capsys.readouterr().out.splitlines()
    assert ''.join(line.strip() for line in lines) == escape_name(name)


def test_report_on_terminal_lists_all_run_names(named_runs, capsys):
    report.print_runs(summary_table.make_run_table([run for run in named_runs if len(run.name) < 40]))
    assert set(map(escape_name, SHORT_NAMES)) <= set(read_first_column(capsys.readouterr().out))


def test_report_json_keeps_original_names(named_runs, capsys):
    paths = [str(run.run_dir) for run in named_runs[:12]]
    assert main(['report', *paths, '--json', f'--out={named_runs[0].run_dir}/out']) == 0
    assert [row['run'] for row in json.loads(capsys.readouterr().out)] == HOSTILE_NAMES[:12]


def test_report_skips_run_with_non_string_row_name(tmp_path, capsys):
    """Use a row.json that was edited, because a config file always yields a string."""
    damaged_run, valid_run = write_run(tmp_path / 'damaged', 5), write_run(tmp_path / 'sound', '5')
    assert main(['report', damaged_run]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f'{damaged_run}/row.json' in line
    assert main(['report', damaged_run, valid_run, '--json', f'--out={tmp_path}/out']) == 0
    output = capsys.readouterr()
    assert [row['run'] for row in json.loads(output.out)] == ['5']
    assert f'{damaged_run}/row.json' in output.err


@pytest.fixture
def write_table_file(tmp_path, monkeypatch):
    """Return a function that writes a config file with rows of the given names."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))

    def write(names):
        rows = ', '.join(f'{name!a}: dict(diff={{}}, published={{}}, source={name!a})' for name in names)
        body = f'from conftest import make_tiny_config\nROWS = {{{rows}}}\n'
        body += 'def get_config(row=None):\n    ROWS[row]\n    return make_tiny_config()\n'
        (tmp_path / 'table.py').write_text(body)
        return str(tmp_path / 'table.py')

    return write


def test_rows_lists_rows_of_any_name(write_table_file, capsys):
    assert main(['rows', f'--config={write_table_file([*HOSTILE_NAMES, 5])}', '--json']) == 0
    assert [row['row'] for row in json.loads(capsys.readouterr().out)] == [*HOSTILE_NAMES, '5']
    assert main(['rows', f'--config={write_table_file([*SHORT_NAMES, 5])}']) == 0
    text = capsys.readouterr().out
    assert set(map(escape_name, [*SHORT_NAMES, 5])) <= set(read_first_column(text))


@pytest.mark.parametrize('names', [[''], [1, '1']], ids=str)
def test_rows_rejects_empty_and_duplicate_row_names(write_table_file, capsys, names):
    assert main(['rows', f'--config={write_table_file(names)}']) == 1
    assert capsys.readouterr().err.count('\n') == 1


def test_error_message_escapes_control_characters_in_one_line(capsys):
    assert main(['report', '/tmp/none\nof\x1b[31mthese']) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert '\x1b' not in line


@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=ascii)
def test_sweep_table_shows_escaped_name_in_heading_and_cell(capsys, name):
    sweep.print_table_with_note([f'Sink_1 - {name}', 'n'], [[name, '1']])
    text = capsys.readouterr().out
    assert ''.join(text.split()).count(''.join(escape_name(name).split())) >= (2 if len(name) < 40 else 0)


@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=ascii)
def test_progress_display_shows_escaped_name(monkeypatch, name):
    """Remove the escape sequences that rich writes to a terminal."""
    monkeypatch.setenv('COLUMNS', '2000')
    monkeypatch.setenv('FORCE_COLOR', '1')
    monkeypatch.setenv('TERM', 'xterm')
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, 'stderr', stream)
    with progress.ProgressCallback(name, make_tiny_spec()) as callback:
        assert callback.display.is_live
        callback.on_record({'step': 1, 'train/loss': 1.0}, written=True)
        callback.on_message(f'note of {name}')
    with measure.show_progress(name, 3) as update:
        update(1)
    text = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]|\r', '', stream.getvalue())
    assert escape_name(name) in text
    assert f'{escape_name(name)}  note of {escape_name(name)}' in text
    assert f'measuring {escape_name(name)}' in text
    assert all(letter.isprintable() for letter in text.replace('\n', ''))


@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=ascii)
def test_measure_output_shows_escaped_name(capsys, name):
    numbers = {'sink/1': 5.0, 'sink/1/T16@0.3': 5.0, 'perturbation/1': 0.5}
    measurement = dict(
        model=name, dtype='float32', bos='auto', inputs={name: numbers}, published={}, remarks=[f'remark of {name}']
    )
    measurement |= dict(propositions=[dict(claim=f'claim of {name}', number=None, holds=True)])
    series = {name: dict(emergence=None), f'b{name}': dict(emergence=(None, 4), heads=[])}
    measure.print_measurements([measurement])
    measure.print_emergence(series)
    text, escaped = capsys.readouterr().out, escape_name(name)
    assert all(letter.isprintable() or letter == '\n' for letter in text)
    assert text.splitlines()[0] == escaped
    lines = text.splitlines()[-5:]
    assert lines[0] == f'{escaped}: remark of {escaped}'
    assert lines[1].startswith(f'{escaped}, {escaped}: ')
    assert lines[2] == f'{escaped}: claim of {escaped}: -, holds'
    assert lines[3] == f'{escaped}: no sink has emerged'
    assert lines[4].startswith(f'b{escaped}: Sink_1 emerges')


@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=ascii)
def test_safe_stream_escapes_control_characters(name):
    stream = io.StringIO()
    safe = standard_streams.SafeStream(stream)
    print(name, file=safe)
    single_line_name = name.replace('\n', '').replace('\r', '').replace('\t', '')
    assert all(letter.isprintable() or letter in '\n\r\t' for letter in stream.getvalue())
    if single_line_name == name:
        assert stream.getvalue() == f'{escape_name(name)}\n'


def test_safe_stream_keeps_carriage_returns_and_unescaped_writes():
    stream = io.StringIO()
    safe = standard_streams.SafeStream(stream)
    safe.write('10 %\r20 %\ta\n')
    standard_streams.get_unescaped_stream(safe).write('\x1b[31mred\x1b[0m')
    assert stream.getvalue() == '10 %\r20 %\ta\n\x1b[31mred\x1b[0m'


@given(st.text())
@pytest.mark.slow
def test_escape_control_is_printable_and_idempotent(text):
    escaped = escape.escape_control(text)
    assert escape.escape_control(escaped) == escaped
    assert not re.search(r'[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]', escaped)
    assert escape.escape_control(text, keep='\n').count('\n') == text.count('\n')


def make_sweep_display(tmp_path):
    """Return a run of a sweep whose name moves the cursor, and the display of the sweep."""
    run = plan.SweepRun('[1/2] \x1b[31mb', 0, RunDir(tmp_path / 'b'), None, make_tiny_spec())
    return run, progress.SweepDisplay([run], jobs=1)


def test_sweep_display_escapes_cursor_movement_in_output_line(tmp_path, capsys):
    run, display = make_sweep_display(tmp_path)
    line = '[2/2] a, seed 0: step\x1b[1A\r[1/2] b\x9b31m\xff'.encode('latin-1') + b'\n'
    assert not display.on_output_line(run, line)
    stderr = capsys.readouterr().err
    assert stderr.endswith('\n')
    assert stderr[:-1].isprintable()
    assert stderr.startswith('[1/2] \\x1b[31mb, seed 0: [2/2] a, seed 0: step\\x1b[1A\\r[1/2] b')


def test_sweep_display_escapes_subprocess_output(tmp_path, capsys):
    run, display = make_sweep_display(tmp_path)
    with SignalForwarder() as forwarder:
        command = [sys.executable, '-c', 'print("a\\x1b[2Jb\\rc")']
        exit_code, output = forwarder.run_command(command, on_line=lambda line: display.on_output_line(run, line))
    assert exit_code == 0
    assert '\x1b[2J' in output
    assert capsys.readouterr().err == '[1/2] \\x1b[31mb, seed 0: a\\x1b[2Jb\\rc\n'


class ElementCollector(HTMLParser):
    """Parser that collects the elements of a page and the text of each."""

    def __init__(self, text):
        super().__init__()
        self.open_tags, self.elements, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open_tags.append(tag)
        self.elements.append([tag, dict(attributes), ''])

    def handle_endtag(self, tag):
        self.open_tags.pop()

    def handle_data(self, data):
        if self.elements:
            self.elements[-1][2] += data


@pytest.mark.slow
def test_report_page_escapes_html_in_names(named_runs, tmp_path):
    page.write_report_page(tmp_path / 'report.html', named_runs)
    text = (tmp_path / 'report.html').read_text(encoding='utf-8')
    collector = ElementCollector(text)
    headings = [
        element_text
        for tag, attributes, element_text in collector.elements
        if tag == 'th' and attributes.get('scope') == 'row'
    ]
    names = [escape_name(name) for name in [*HOSTILE_NAMES, '5']]
    assert sorted(headings) == sorted([*names, *names]), 'by row and by run'
    assert collector.tags.count('script') == 2
    assert 'b' not in collector.tags
    packed_text = next(
        element_text for tag, attributes, element_text in collector.elements if attributes.get('id') == 'payload'
    )
    unpacked = gzip.decompress(base64.b64decode(packed_text))
    content = json.loads(unpacked[4 : 4 + int.from_bytes(unpacked[:4], 'little')])
    assert sorted(group['name'] for group in content['groups']) == sorted(names)
    assert sorted(run['name'] for run in content['runs']) == sorted(names)


LATEX_COMMANDS = {
    'textbackslash': '\\',
    'textasciitilde': '~',
    'textasciicircum': '^',
    'textless': '<',
    'textgreater': '>',
    'textbar': '|',
    'textasciigrave': '`',
    'textquotesingle': "'",
}


DOUBLE_QUOTE = '\\textquotesingle{}' * 2


def parse_latex_row(text):
    """Return the cells of a table line as LaTeX typesets it.

    Fail on other commands, mathematics and ligatures.
    """
    cells, position = [''], 0
    while position < len(text):
        letter, rest = text[position], text[position:]
        if rest.startswith(DOUBLE_QUOTE):
            cells[-1] += '"'
            position += len(DOUBLE_QUOTE)
        elif command := re.match(r'\\([A-Za-z]+)\{\}', rest):
            cells[-1] += LATEX_COMMANDS[command[1]]
            position += len(command[0])
        elif letter == '\\':
            assert rest[1] in '&%$#_{}', rest
            cells[-1] += rest[1]
            position += 2
        elif rest.startswith('{}'):
            position += 2
        elif rest.startswith(('$\\pm$', '$-$')):
            cells[-1] += '±' if rest[1] == '\\' else '−'
            position += rest.index('$', 1) + 1
        elif letter == '&':
            cells.append('')
            position += 1
        else:
            assert letter not in '%$#_{}~^<>|`\'"', rest
            assert not rest.startswith(('--', ',,')), rest
            cells[-1] += letter
            position += 1
    return [cell.strip() for cell in cells]


def test_latex_table_escapes_names(named_runs):
    lines = latex.format_latex_table(run_groups.make_group_table(run_groups.group_runs(named_runs)), {}).splitlines()
    body_lines = lines[lines.index('\\midrule') + 1 : lines.index('\\bottomrule')]
    assert all(line.endswith(' \\\\') for line in body_lines)
    assert not any(line.startswith(('[', '*')) for line in body_lines), (
        'parsed as an argument of the previous line end'
    )
    cells = [parse_latex_row(line[:-3]) for line in body_lines]
    assert len({len(row) for row in cells}) == 1
    assert sorted(row[0] for row in cells) == sorted(escape_name(name).strip() for name in [*HOSTILE_NAMES, '5'])


@pytest.mark.slow
def test_figure_legends_and_titles_show_escaped_names(named_runs):
    pytest.importorskip('matplotlib')
    from matplotlib import pyplot as plt

    from sinklab.metrics.registry import FIGURES
    from sinklab.report import pictures

    heads_figure, ratios_figure = (
        next(figure_info for figure_info in FIGURES if figure_info.kind == kind) for kind in ('heads', 'ratios')
    )
    groups = run_groups.group_runs(named_runs)
    with warnings.catch_warnings(), plt.rc_context(escape.FIGURE_RC_PARAMS):
        warnings.filterwarnings('error')
        warnings.filterwarnings('ignore', 'Glyph|.*layout not applied')
        for chunk in [groups[start : start + 12] for start in range(0, len(groups), 12)]:
            names = [escape_name(group.name) for group in chunk]
            for figure in (pictures.draw_curves(chunk, None), pictures.draw_ratios(chunk, ratios_figure)):
                figure.canvas.draw()
                legends = [*figure.legends, *filter(None, (axis.get_legend() for axis in figure.axes))]
                assert [text.get_text().replace('\n', '') for text in legends[0].get_texts()] == names
                plt.close(figure)
            figure = pictures.draw_head_maps(chunk, heads_figure)
            figure.canvas.draw()
            assert [axis.get_title().replace('\n', '') for axis in figure.axes][: len(names)] == names
            plt.close(figure)


@pytest.mark.slow
def test_report_svg_shows_names_with_special_characters(tmp_path):
    pytest.importorskip('matplotlib')
    names = ['$', '$\\frac$', '_x', '\ud800', '[/]']
    paths = [write_run(tmp_path / str(index), name) for index, name in enumerate(names)]
    assert main(['report', *paths, '--svg']) == 0
    texts = re.findall(r'>([^<]*)</text>', (tmp_path / 'curves.svg').read_text(encoding='utf-8'))
    assert set(map(escape_name, names)) <= {*texts}


def test_claims_markdown_escapes_column_separators_and_html():
    claim_text = 'a | b\nc <script> d < e \\'
    entry = dict(
        claim='x',
        statement=claim_text,
        source='s|t',
        untestable_reason='',
        comparison='',
        published=None,
        interval=None,
        mean=None,
    )
    entry |= dict(
        differences={},
        verdict='holds',
        diverged=0,
        failing_rows=[],
        seeds_needed=None,
        can_have_either_sign=False,
        relation='>',
    )
    lines = claims.format_markdown([entry]).splitlines()
    assert [len(re.findall(r'(?<!\\)\|', line)) for line in lines[:3]] == [7] * 3
    assert not re.search(r'(?<!\\)<[a-z]', lines[2])


def render_markdown_cell(text):
    """Render a text in a Markdown table cell and check that it adds no element and no cell."""
    markdown = MarkdownIt('commonmark').enable('table')
    collector = ElementCollector(
        markdown.render(f'| a | b | c |\n|---|---|---|\n| 1 | {escape.escape_markdown(text)} | 3 |\n')
    )
    before, cell, after = (cell_text.strip() for tag, _, cell_text in collector.elements if tag == 'td')
    assert (before, after) == ('1', '3')
    assert {*collector.tags} == {'table', 'thead', 'tbody', 'tr', 'th', 'td'}
    return cell


@pytest.mark.parametrize('name', [name for name in HOSTILE_NAMES if name != '`id`'], ids=ascii)
def test_escape_markdown_keeps_name_in_table_cell(name):
    """Exclude code in backticks, which is not escaped."""
    assert render_markdown_cell(name) == escape_name(name)


@given(st.text(alphabet='\\|<&#;/!bx1 '))
def test_escape_markdown_keeps_special_characters_in_table_cell(text):
    assert render_markdown_cell(text) == text.strip()


@pytest.mark.parametrize('name', ['\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645', '\U0001f469\u200d\U0001f52c'])
def test_escape_control_keeps_zero_width_joiners(name):
    assert escape.escape_control(name) == name


@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=ascii)
def test_run_dir_name_is_single_folder_below_sweep(tmp_path, name):
    folder = tmp_path / plan.get_run_dir_name(name, 3)
    folder.mkdir()
    assert list(tmp_path.iterdir()) == [folder]
    assert folder.name.endswith('-3')
    assert glob.glob('*', root_dir=tmp_path) == [folder.name]
    assert check_run_dir(RunDir(folder), make_tiny_spec()) is None, 'checkpoints can be saved there'


def test_run_dir_names_are_unique_and_keep_plain_row_names():
    names = [plan.get_run_dir_name(name, 0) for name in HOSTILE_NAMES]
    assert len(set(names)) == len(names)
    plain = ['softmax', 'sigmoid_norm', 'a-b.c', 'ü', '50%', 'two words']
    assert [plan.get_run_dir_name(name, 1) for name in plain] == [f'{name}-1' for name in plain]


@given(st.text(), st.text())
@pytest.mark.slow
def test_quote_file_name_is_unique_and_valid(first, second):
    file_names = escape.quote_file_name(first), escape.quote_file_name(second)
    assert (file_names[0] == file_names[1]) == (first == second)
    for file_name in file_names:
        assert not {'/', '\0'} & {*file_name}
        assert file_name not in ('.', '..')
        assert len(file_name.encode()) <= 255


def test_plan_runs_rejects_rows_with_same_run_dir(tmp_path):
    row = dict(size=None)
    with pytest.raises(plan.UserError):
        plan.plan_runs(
            ['a/t.py:x', 'b/t.py:x'], [0], str(tmp_path / 'w'), lambda *_: (make_tiny_spec(), row), Hardware()
        )


def test_quote_file_name_removes_slashes():
    assert '/' not in escape.quote_file_name('along-../../x')


def test_join_shell_output_is_parsed_back_by_bash():
    arguments = [name for name in HOSTILE_NAMES if '\0' not in name and '\ud800' not in name] + [
        os.fsdecode(b'\xff/x'),
        '',
    ]
    line = escape.join_shell(arguments)
    assert line.isprintable()
    stdout = subprocess.run(['bash', '-c', f'printf "%s\\0" {line}'], capture_output=True, check=True).stdout
    assert [os.fsdecode(argument) for argument in stdout.split(b'\0')[:-1]] == arguments
    plain = [argument for argument in arguments if argument.isprintable()]
    assert shlex.split(escape.join_shell(plain)) == plain


def format_numbers(row):
    """Return the numbers of a row of `report --json` as its table formats them."""
    cells = summary_table.format_run_cells(row)
    return [text for text in cells[1:] if any(letter.isdigit() for letter in text)]


@pytest.mark.parametrize('columns', [80, 60, 40])
def test_report_shows_whole_numbers_on_narrow_terminal(tmp_path, monkeypatch, capsys, columns):
    metrics = {'sink/star': 12.345, 'entropy/row': 3.14159, 'sink/star/clean': 1.5}
    names = ['softmax', 'a row with a name that is much longer than there is room for']
    paths = [
        write_run(tmp_path / str(index), name, steps=(0, 10, 20000), extra_metrics=metrics)
        for index, name in enumerate(names)
    ]
    assert main(['report', *paths, '--json']) == 0
    rows = json.loads(capsys.readouterr().out)
    monkeypatch.setenv('COLUMNS', str(columns))
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    assert main(['report', *paths]) == 0
    text = re.sub(r'\x1b\[[0-9;]*m', '', capsys.readouterr().out.partition('report: ')[0])
    joined_text = re.sub(r'\s+', ' ', text)
    for number in (number for row in rows for number in format_numbers(row)):
        assert re.search(rf'(?<!\S){re.escape(number)}(?!\S)', joined_text), number
    assert all(len(line) <= columns for line in text.splitlines())
    assert '…' not in text
    for heading, column in zip(
        summary_table.RUN_HEADINGS, zip(*map(summary_table.format_run_cells, rows), strict=True), strict=True
    ):
        assert heading in joined_text or {*column} == {'-'}


@pytest.mark.parametrize('columns', [80, 60])
def test_sweep_table_shows_whole_numbers_on_narrow_terminal(monkeypatch, capsys, columns):
    cells = [f'{index}2.34 ± 0.56 (18.{index}8)' for index in range(1, 8)]
    monkeypatch.setenv('COLUMNS', str(columns))
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    sweep.print_table_with_note(
        ['row', *map(str, range(1, 8)), 'outcome'], [['softmax', *cells, 'diverged 1/3, done 2/3']]
    )
    text = capsys.readouterr().out
    assert all(cell in text for cell in cells)


@pytest.mark.parametrize('columns', [60, 80, 200])
def test_print_table_wraps_text_columns_and_keeps_numbers_whole(monkeypatch, capsys, columns):
    monkeypatch.setenv('COLUMNS', str(columns))
    names, numbers = ['a task that has a long name', 'a metric that has a long name'], ['12,345,678', '0.1234±0.0056']
    headings = ['task', 'metric', 'n', 'value']
    terminal.print_table(terminal.make_console(), headings, [[*names, *numbers]], wrap_columns=['metric'])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == headings, 'in one piece'
    assert max(map(len, lines)) <= columns
    assert {*names[0].split(), *names[1].split(), *numbers} <= {*' '.join(lines).split()}


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=6), st.integers(40, 120))
def test_shrink_widths_keeps_minimum_and_unfoldable_widths(columns, total_width):
    widths, foldable = map(list, zip(*columns, strict=True))
    foldable[0] = True
    new_widths = terminal.shrink_widths(widths, foldable, total_width)
    assert all(
        new == old for new, old, is_foldable in zip(new_widths, widths, foldable, strict=True) if not is_foldable
    )
    assert all(min(terminal.MIN_COLUMN_WIDTH, old) <= new <= old for new, old in zip(new_widths, widths, strict=True))
    foldable_width = sum(new for new, is_foldable in zip(new_widths, foldable, strict=True) if is_foldable)
    remaining_width = total_width - terminal.COLUMN_GAP * len(widths) - (sum(new_widths) - foldable_width)
    min_foldable_width = sum(
        min(width, terminal.MIN_COLUMN_WIDTH)
        for width, is_foldable in zip(widths, foldable, strict=True)
        if is_foldable
    )
    if remaining_width >= min_foldable_width:
        assert foldable_width <= remaining_width
    else:
        assert foldable_width <= max(total_width // 3, min_foldable_width)


def test_print_table_aligns_rich_text_headings_with_columns(capsys):
    headings = ['row', Text('side'), Text('of')]
    terminal.print_table(
        terminal.make_console(), headings, [['a', 'left', 'x']], left_columns=['side'], wrap_columns=headings[2:]
    )
    heading, line = capsys.readouterr().out.splitlines()
    assert (heading.index('side'), heading.index('of')) == (line.index('left'), line.index('x'))


NON_UTF8_NAME = os.fsdecode(b'x\xff')
ROW_FLAG = '--config=configs/quickstart.py:softmax'


@pytest.mark.parametrize(
    'arguments',
    [
        ['train', ROW_FLAG, f'--config.data.source=text:{NON_UTF8_NAME}/*.txt', '--workdir=w'],
        ['train', ROW_FLAG, f'--config.data.source=store:{NON_UTF8_NAME}', '--workdir=w'],
        ['train', ROW_FLAG, f'--config.data.tokenizer={NON_UTF8_NAME}', '--workdir=w'],
        ['train', ROW_FLAG, '--size=smoke', f'--compiled={NON_UTF8_NAME}', '--workdir=w'],
        ['train', ROW_FLAG, f'--size={NON_UTF8_NAME}', '--workdir=w'],
        ['train', ROW_FLAG, f'--coordinator={NON_UTF8_NAME}:80', '--processes=2', '--process=1', '--workdir=w'],
        ['train', ROW_FLAG, f'--coordinator={"x" * 300}:80', '--processes=2', '--process=1', '--workdir=w'],
        ['train', f'--from={NON_UTF8_NAME}', '--workdir=w'],
        ['train', f'--config={NON_UTF8_NAME}.py', '--workdir=w'],
        ['rows', f'--config={NON_UTF8_NAME}.py'],
        ['sweep', f'--config={NON_UTF8_NAME}.py', '--workdir=w'],
        ['sweep', '--config=configs/quickstart.py', f'--workdir={NON_UTF8_NAME}'],
        ['claims', f'--results={NON_UTF8_NAME}'],
        ['report', NON_UTF8_NAME],
        ['measure', NON_UTF8_NAME],
        ['tail', NON_UTF8_NAME],
        ['checkpoint', 'ls', NON_UTF8_NAME],
        ['checkpoint', 'import', f'hf:{NON_UTF8_NAME}', '--out=w'],
        ['prepare', f'--source=text:{NON_UTF8_NAME}', '--out=w'],
        ['prepare', '--source=stdlib', f'--tokenizer={NON_UTF8_NAME}', '--out=w'],
        ['prepare', f'--check={NON_UTF8_NAME}'],
        ['compile', ROW_FLAG, f'--topology={NON_UTF8_NAME}'],
    ],
    ids=ascii,
)
def test_non_utf8_argument_is_rejected_with_one_line(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'sinklab {arguments[0]}: ')
    assert '\\udcff' in line or 'xxx' in line
    line.encode()


def test_non_utf8_folder_is_read_and_written(tmp_path):
    folder = tmp_path / NON_UTF8_NAME
    try:
        folder.mkdir()
    except OSError:
        pytest.skip('this file system has no names that are not UTF-8')
    path = write_run(folder / 'run', 'softmax')
    assert main(['report', path, '--latex', f'--out={folder}/out']) == 0
    assert {file.name for file in (folder / 'out').iterdir()} == {'report.html', 'table.tex'}
    (folder / 'text.txt').write_text('some words here. ' * 2000)
    with pytest.raises(UserError):
        check_utf8(folder, 'it could not')
    store = tmp_path / 'store'
    assert main(['prepare', f'--source=text:{folder}/*.txt', f'--out={store}', '--vocabulary=300']) == 0
