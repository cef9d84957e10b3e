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
from sinklab.cli import (
    measure,
    progress,
    report,
    sweep,
    terminal,
)
from sinklab.cli.main import main
from sinklab.config.spec import Hardware
from sinklab.errors import UserError
from sinklab.report import (
    claims,
    latex,
    page,
    run_groups,
    runs,
    summary_table,
)
from sinklab.run_dir import RunDir
from sinklab.storage.paths import check_utf8
from sinklab.sweep import plan
from sinklab.sweep.run import SignalForwarder

SHORT = [name for name in HOSTILE_NAMES if len(name) < 40]


@pytest.fixture(scope='module')
def found(tmp_path_factory):
    """Make one run for each name, and one whose name is a number."""
    folder = tmp_path_factory.mktemp('named')
    paths = [write_run(folder / str(at), name, steps=(0, 10)) for at, name in enumerate([*HOSTILE_NAMES, '5'])]
    return runs.read_runs(paths)


def shown_names(text):
    """Return the first column of tables that are printed without borders."""
    return [line[1:].split('  ')[0].rstrip() for line in text.splitlines()]


@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=ascii)
def test_terminal_table_shows_escaped_name_in_cell(capsys, name):
    terminal.print_table(terminal.make_console(width=100), ['row'], [[name]])
    _, *lines = capsys.readouterr().out.splitlines()
    assert ''.join(line.strip() for line in lines) == escape_name(name)


def test_report_on_terminal_lists_all_run_names(found, capsys):
    report.print_runs(summary_table.make_run_table([run for run in found if len(run.name) < 40]))
    assert set(map(escape_name, SHORT)) <= set(shown_names(capsys.readouterr().out))


def test_report_json_keeps_original_names(found, capsys):
    paths = [str(run.run_dir) for run in found[:12]]
    assert main(['report', *paths, '--json', f'--out={found[0].run_dir}/out']) == 0
    assert [row['run'] for row in json.loads(capsys.readouterr().out)] == HOSTILE_NAMES[:12]


def test_report_skips_run_with_non_string_row_name(tmp_path, capsys):
    """Use a row.json that was edited, because a config file always yields a string."""
    damaged, sound = write_run(tmp_path / 'damaged', 5), write_run(tmp_path / 'sound', '5')
    assert main(['report', damaged]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f'{damaged}/row.json' in line
    assert main(['report', damaged, sound, '--json', f'--out={tmp_path}/out']) == 0
    printed = capsys.readouterr()
    assert [row['run'] for row in json.loads(printed.out)] == ['5']
    assert f'{damaged}/row.json' in printed.err


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Return a function that writes a config file with rows of the given names."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))

    def write(names):
        rows = ', '.join(f'{name!a}: dict(diff={{}}, published={{}}, source={name!a})' for name in names)
        body = f'from conftest import make_tiny_config\nROWS = {{{rows}}}\n'
        body += 'def get_config(row=None):\n    ROWS[row]\n    return make_tiny_config()\n'
        (tmp_path / 'table.py').write_text(body)
        return str(tmp_path / 'table.py')

    return write


def test_rows_lists_rows_of_any_name(table, capsys):
    assert main(['rows', f'--config={table([*HOSTILE_NAMES, 5])}', '--json']) == 0
    assert [row['row'] for row in json.loads(capsys.readouterr().out)] == [*HOSTILE_NAMES, '5']
    assert main(['rows', f'--config={table([*SHORT, 5])}']) == 0
    text = capsys.readouterr().out
    assert set(map(escape_name, [*SHORT, 5])) <= set(shown_names(text))


@pytest.mark.parametrize('names', [[''], [1, '1']], ids=str)
def test_rows_rejects_empty_and_duplicate_row_names(table, capsys, names):
    assert main(['rows', f'--config={table(names)}']) == 1
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
    with progress.ProgressCallback(name, make_tiny_spec()) as shown:
        assert shown.display.is_live
        shown.on_record({'step': 1, 'train/loss': 1.0}, written=True)
        shown.on_message(f'note of {name}')
    with measure.show_progress(name, 3) as watch:
        watch(1)
    text = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]|\r', '', stream.getvalue())
    assert escape_name(name) in text
    assert f'{escape_name(name)}  note of {escape_name(name)}' in text
    assert f'measuring {escape_name(name)}' in text
    assert all(letter.isprintable() for letter in text.replace('\n', ''))


@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=ascii)
def test_measure_output_shows_escaped_name(capsys, name):
    numbers = {'sink/1': 5.0, 'sink/1/T16@0.3': 5.0, 'perturbation/1': 0.5}
    told = dict(
        model=name, dtype='float32', bos='auto', inputs={name: numbers}, published={}, remarks=[f'remark of {name}']
    )
    told |= dict(propositions=[dict(claim=f'claim of {name}', number=None, holds=True)])
    series = {name: dict(emergence=None), f'b{name}': dict(emergence=(None, 4), heads=[])}
    measure.print_measurements([told])
    measure.print_emergence(series)
    text, shown = capsys.readouterr().out, escape_name(name)
    assert all(letter.isprintable() or letter == '\n' for letter in text)
    assert text.splitlines()[0] == shown
    lines = text.splitlines()[-5:]
    assert lines[0] == f'{shown}: remark of {shown}'
    assert lines[1].startswith(f'{shown}, {shown}: ')
    assert lines[2] == f'{shown}: claim of {shown}: -, holds'
    assert lines[3] == f'{shown}: no sink has emerged'
    assert lines[4].startswith(f'b{shown}: Sink_1 emerges')


@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=ascii)
def test_safe_stream_escapes_control_characters(name):
    stream = io.StringIO()
    safe = standard_streams.SafeStream(stream)
    print(name, file=safe)
    kept = name.replace('\n', '').replace('\r', '').replace('\t', '')
    assert all(letter.isprintable() or letter in '\n\r\t' for letter in stream.getvalue())
    if kept == name:
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
    once = escape.escape_control(text)
    assert escape.escape_control(once) == once
    assert not re.search(r'[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]', once)
    assert escape.escape_control(text, keep='\n').count('\n') == text.count('\n')


def display_of_sweep(tmp_path):
    """Return a run of a sweep whose name moves the cursor, and the display of the sweep."""
    run = plan.SweepRun('[1/2] \x1b[31mb', 0, RunDir(tmp_path / 'b'), None, make_tiny_spec())
    return run, progress.SweepDisplay([run], jobs=1)


def test_sweep_display_escapes_cursor_movement_in_output_line(tmp_path, capsys):
    run, display = display_of_sweep(tmp_path)
    line = '[2/2] a, seed 0: step\x1b[1A\r[1/2] b\x9b31m\xff'.encode('latin-1') + b'\n'
    assert not display.on_output_line(run, line)
    said = capsys.readouterr().err
    assert said.endswith('\n')
    assert said[:-1].isprintable()
    assert said.startswith('[1/2] \\x1b[31mb, seed 0: [2/2] a, seed 0: step\\x1b[1A\\r[1/2] b')


def test_sweep_display_escapes_subprocess_output(tmp_path, capsys):
    run, display = display_of_sweep(tmp_path)
    with SignalForwarder() as relay:
        command = [sys.executable, '-c', 'print("a\\x1b[2Jb\\rc")']
        code, said = relay.run_command(command, on_line=lambda line: display.on_output_line(run, line))
    assert code == 0
    assert '\x1b[2J' in said
    assert capsys.readouterr().err == '[1/2] \\x1b[31mb, seed 0: a\\x1b[2Jb\\rc\n'


class Cells(HTMLParser):
    """Parser that collects the elements of a page and the text of each."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open.append(tag)
        self.words.append([tag, dict(attributes), ''])

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        if self.words:
            self.words[-1][2] += data


@pytest.mark.slow
def test_report_page_escapes_html_in_names(found, tmp_path):
    page.write_report_page(tmp_path / 'report.html', found)
    text = (tmp_path / 'report.html').read_text(encoding='utf-8')
    cells = Cells(text)
    heads = [words for tag, about, words in cells.words if tag == 'th' and about.get('scope') == 'row']
    names = [escape_name(name) for name in [*HOSTILE_NAMES, '5']]
    assert sorted(heads) == sorted([*names, *names]), 'by row and by run'
    assert cells.tags.count('script') == 2
    assert 'b' not in cells.tags
    packed = next(words for tag, about, words in cells.words if about.get('id') == 'packed')
    whole = gzip.decompress(base64.b64decode(packed))
    content = json.loads(whole[4 : 4 + int.from_bytes(whole[:4], 'little')])
    assert sorted(group['name'] for group in content['groups']) == sorted(names)
    assert sorted(run['name'] for run in content['runs']) == sorted(names)


COMMANDS = {
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


def typeset(text):
    """Return the cells of a table line as LaTeX typesets it.

    Fail on other commands, mathematics and ligatures.
    """
    cells, at = [''], 0
    while at < len(text):
        letter, rest = text[at], text[at:]
        if rest.startswith(DOUBLE_QUOTE):
            cells[-1] += '"'
            at += len(DOUBLE_QUOTE)
        elif command := re.match(r'\\([A-Za-z]+)\{\}', rest):
            cells[-1] += COMMANDS[command[1]]
            at += len(command[0])
        elif letter == '\\':
            assert rest[1] in '&%$#_{}', rest
            cells[-1] += rest[1]
            at += 2
        elif rest.startswith('{}'):
            at += 2
        elif rest.startswith(('$\\pm$', '$-$')):
            cells[-1] += '±' if rest[1] == '\\' else '−'
            at += rest.index('$', 1) + 1
        elif letter == '&':
            cells.append('')
            at += 1
        else:
            assert letter not in '%$#_{}~^<>|`\'"', rest
            assert not rest.startswith(('--', ',,')), rest
            cells[-1] += letter
            at += 1
    return [cell.strip() for cell in cells]


def test_latex_table_escapes_names(found):
    lines = latex.format_latex_table(run_groups.make_group_table(run_groups.group_runs(found)), {}).splitlines()
    body = lines[lines.index('\\midrule') + 1 : lines.index('\\bottomrule')]
    assert all(line.endswith(' \\\\') for line in body)
    assert not any(line.startswith(('[', '*')) for line in body), 'parsed as an argument of the previous line end'
    cells = [typeset(line[:-3]) for line in body]
    assert len({len(row) for row in cells}) == 1
    assert sorted(row[0] for row in cells) == sorted(escape_name(name).strip() for name in [*HOSTILE_NAMES, '5'])


@pytest.mark.slow
def test_figure_legends_and_titles_show_escaped_names(found):
    pytest.importorskip('matplotlib')
    from matplotlib import pyplot as plt

    from sinklab.metrics.registry import FIGURES
    from sinklab.report import pictures

    heads, ratios = (next(one for one in FIGURES if one.kind == kind) for kind in ('heads', 'ratios'))
    every = run_groups.group_runs(found)
    with warnings.catch_warnings(), plt.rc_context(escape.FIGURE_RC_PARAMS):
        warnings.filterwarnings('error')
        warnings.filterwarnings('ignore', 'Glyph|.*layout not applied')
        for some in [every[at : at + 12] for at in range(0, len(every), 12)]:
            names = [escape_name(group.name) for group in some]
            for figure in (pictures.draw_curves(some, None), pictures.draw_ratios(some, ratios)):
                figure.canvas.draw()
                told = [*figure.legends, *filter(None, (axis.get_legend() for axis in figure.axes))]
                assert [text.get_text().replace('\n', '') for text in told[0].get_texts()] == names
                plt.close(figure)
            figure = pictures.draw_head_maps(some, heads)
            figure.canvas.draw()
            assert [axis.get_title().replace('\n', '') for axis in figure.axes][: len(names)] == names
            plt.close(figure)


@pytest.mark.slow
def test_report_svg_shows_names_with_special_characters(tmp_path):
    pytest.importorskip('matplotlib')
    names = ['$', '$\\frac$', '_x', '\ud800', '[/]']
    paths = [write_run(tmp_path / str(at), name) for at, name in enumerate(names)]
    assert main(['report', *paths, '--svg']) == 0
    words = re.findall(r'>([^<]*)</text>', (tmp_path / 'curves.svg').read_text(encoding='utf-8'))
    assert set(map(escape_name, names)) <= {*words}


def test_claims_markdown_escapes_column_separators_and_html():
    words = 'a | b\nc <script> d < e \\'
    entry = dict(claim='x', words=words, source='s|t', why='', contrast='', published=None, interval=None, mean=None)
    entry |= dict(
        differences={}, verdict='holds', diverged=0, failing_rows=[], seeds_needed=None, either=False, way='>'
    )
    table = claims.format_markdown([entry]).splitlines()
    assert [len(re.findall(r'(?<!\\)\|', line)) for line in table[:3]] == [7] * 3
    assert not re.search(r'(?<!\\)<[a-z]', table[2])


def markdown_cell(text):
    """Render a text in a Markdown table cell and check that it adds no element and no cell."""
    reader = MarkdownIt('commonmark').enable('table')
    page = Cells(reader.render(f'| a | b | c |\n|---|---|---|\n| 1 | {escape.escape_markdown(text)} | 3 |\n'))
    before, cell, after = (words.strip() for tag, _, words in page.words if tag == 'td')
    assert (before, after) == ('1', '3')
    assert {*page.tags} == {'table', 'thead', 'tbody', 'tr', 'th', 'td'}
    return cell


@pytest.mark.parametrize('name', [name for name in HOSTILE_NAMES if name != '`id`'], ids=ascii)
def test_escape_markdown_keeps_name_in_table_cell(name):
    """Exclude code in backticks, which is not escaped."""
    assert markdown_cell(name) == escape_name(name)


@given(st.text(alphabet='\\|<&#;/!bx1 '))
def test_escape_markdown_keeps_special_characters_in_table_cell(text):
    assert markdown_cell(text) == text.strip()


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
    assert RunDir(folder).check_spec(make_tiny_spec()) is None, 'checkpoints can be saved there'


def test_run_dir_names_are_unique_and_keep_plain_row_names():
    names = [plan.get_run_dir_name(name, 0) for name in HOSTILE_NAMES]
    assert len(set(names)) == len(names)
    plain = ['softmax', 'sigmoid_norm', 'a-b.c', 'ü', '50%', 'two words']
    assert [plan.get_run_dir_name(name, 1) for name in plain] == [f'{name}-1' for name in plain]


@given(st.text(), st.text())
@pytest.mark.slow
def test_quote_file_name_is_unique_and_valid(one, other):
    files = escape.quote_file_name(one), escape.quote_file_name(other)
    assert (files[0] == files[1]) == (one == other)
    for file in files:
        assert not {'/', '\0'} & {*file}
        assert file not in ('.', '..')
        assert len(file.encode()) <= 255


def test_plan_runs_rejects_rows_with_same_run_dir(tmp_path):
    row = dict(size=None)
    with pytest.raises(plan.UserError):
        plan.plan_runs(
            ['a/t.py:x', 'b/t.py:x'], [0], str(tmp_path / 'w'), lambda *_: (make_tiny_spec(), row), Hardware()
        )


def test_quote_file_name_removes_slashes():
    assert '/' not in escape.quote_file_name('along-../../x')


def test_join_shell_output_is_parsed_back_by_bash():
    words = [name for name in HOSTILE_NAMES if '\0' not in name and '\ud800' not in name] + [
        os.fsdecode(b'\xff/x'),
        '',
    ]
    line = escape.join_shell(words)
    assert line.isprintable()
    said = subprocess.run(['bash', '-c', f'printf "%s\\0" {line}'], capture_output=True, check=True).stdout
    assert [os.fsdecode(word) for word in said.split(b'\0')[:-1]] == words
    plain = [word for word in words if word.isprintable()]
    assert shlex.split(escape.join_shell(plain)) == plain


def numbers_of(row):
    """Return the numbers of a row of `report --json` as its table formats them."""
    cells = summary_table.format_run_cells(row)
    return [text for text in cells[1:] if any(letter.isdigit() for letter in text)]


@pytest.mark.parametrize('columns', [80, 60, 40])
def test_report_shows_whole_numbers_on_narrow_terminal(tmp_path, monkeypatch, capsys, columns):
    more = {'sink/star': 12.345, 'entropy/row': 3.14159, 'sink/star/clean': 1.5}
    names = ['softmax', 'a row with a name that is much longer than there is room for']
    paths = [write_run(tmp_path / str(at), name, steps=(0, 10, 20000), more=more) for at, name in enumerate(names)]
    assert main(['report', *paths, '--json']) == 0
    rows = json.loads(capsys.readouterr().out)
    monkeypatch.setenv('COLUMNS', str(columns))
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    assert main(['report', *paths]) == 0
    text = re.sub(r'\x1b\[[0-9;]*m', '', capsys.readouterr().out.partition('report: ')[0])
    words = re.sub(r'\s+', ' ', text)
    for number in (number for row in rows for number in numbers_of(row)):
        assert re.search(rf'(?<!\S){re.escape(number)}(?!\S)', words), number
    assert all(len(line) <= columns for line in text.splitlines())
    assert '…' not in text
    for heading, column in zip(
        summary_table.RUN_HEADINGS, zip(*map(summary_table.format_run_cells, rows), strict=True), strict=True
    ):
        assert heading in words or {*column} == {'-'}


@pytest.mark.parametrize('columns', [80, 60])
def test_sweep_table_shows_whole_numbers_on_narrow_terminal(monkeypatch, capsys, columns):
    cells = [f'{at}2.34 ± 0.56 (18.{at}8)' for at in range(1, 8)]
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
    words, numbers = ['a task that has a long name', 'a metric that has a long name'], ['12,345,678', '0.1234±0.0056']
    headings = ['task', 'metric', 'n', 'value']
    terminal.print_table(terminal.make_console(), headings, [[*words, *numbers]], wrap_columns=['metric'])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == headings, 'in one piece'
    assert max(map(len, lines)) <= columns
    assert {*words[0].split(), *words[1].split(), *numbers} <= {*' '.join(lines).split()}


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=6), st.integers(40, 120))
def test_shrink_widths_keeps_minimum_and_unfoldable_widths(columns, room):
    widths, foldable = map(list, zip(*columns, strict=True))
    foldable[0] = True
    found = terminal.shrink_widths(widths, foldable, room)
    assert all(now == before for now, before, folds in zip(found, widths, foldable, strict=True) if not folds)
    assert all(
        min(terminal.MIN_COLUMN_WIDTH, before) <= now <= before for now, before in zip(found, widths, strict=True)
    )
    least = [
        min(width, terminal.MIN_COLUMN_WIDTH) if folds else width
        for width, folds in zip(widths, foldable, strict=True)
    ]
    together = sum(now for now, folds in zip(found, foldable, strict=True) if folds)
    if sum(least) + terminal.COLUMN_GAP * len(widths) > room:
        assert together <= max(room // 3, terminal.MIN_COLUMN_WIDTH * sum(foldable))


def test_print_table_aligns_rich_text_headings_with_columns(capsys):
    headings = ['row', Text('side'), Text('of')]
    terminal.print_table(
        terminal.make_console(), headings, [['a', 'left', 'x']], left_columns=['side'], wrap_columns=headings[2:]
    )
    heading, line = capsys.readouterr().out.splitlines()
    assert (heading.index('side'), heading.index('of')) == (line.index('left'), line.index('x'))


BAD = os.fsdecode(b'x\xff')
ROW = '--config=configs/quickstart.py:softmax'


@pytest.mark.parametrize(
    'words',
    [
        ['train', ROW, f'--config.data.source=text:{BAD}/*.txt', '--workdir=w'],
        ['train', ROW, f'--config.data.source=store:{BAD}', '--workdir=w'],
        ['train', ROW, f'--config.data.tokenizer={BAD}', '--workdir=w'],
        ['train', ROW, '--size=smoke', f'--compiled={BAD}', '--workdir=w'],
        ['train', ROW, f'--size={BAD}', '--workdir=w'],
        ['train', ROW, f'--coordinator={BAD}:80', '--processes=2', '--process=1', '--workdir=w'],
        ['train', ROW, f'--coordinator={"x" * 300}:80', '--processes=2', '--process=1', '--workdir=w'],
        ['train', f'--from={BAD}', '--workdir=w'],
        ['train', f'--config={BAD}.py', '--workdir=w'],
        ['rows', f'--config={BAD}.py'],
        ['sweep', f'--config={BAD}.py', '--workdir=w'],
        ['sweep', '--config=configs/quickstart.py', f'--workdir={BAD}'],
        ['claims', f'--results={BAD}'],
        ['report', BAD],
        ['measure', BAD],
        ['tail', BAD],
        ['checkpoint', 'ls', BAD],
        ['checkpoint', 'import', f'hf:{BAD}', '--out=w'],
        ['prepare', f'--source=text:{BAD}', '--out=w'],
        ['prepare', '--source=stdlib', f'--tokenizer={BAD}', '--out=w'],
        ['prepare', f'--check={BAD}'],
        ['compile', ROW, f'--topology={BAD}'],
    ],
    ids=ascii,
)
def test_non_utf8_argument_is_rejected_with_one_line(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'sinklab {words[0]}: ')
    assert '\\udcff' in line or 'xxx' in line
    line.encode()


def test_non_utf8_folder_is_read_and_written(tmp_path):
    folder = tmp_path / BAD
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
