"""benchmarks/large_corpus.py: documents of prose and code."""

from benchmarks import large_corpus

PROSE = 'This paragraph of a <b>manual</b> has more than eight words &amp; two lines.'
LINE = 'This paragraph of a manual has more than eight words & two lines.'


def test_html_becomes_paragraphs_without_hidden_parts():
    page = f'\n<html><script>let a = "<p>"</script><!-- <p>none</p> --><h1>Title</h1><p class="x">{PROSE}</p></html>'
    assert [line for line in large_corpus.remove_markup(page).split('\n') if line] == ['Title', LINE]
    assert large_corpus.remove_markup('if a < b and c > d') == 'if a < b and c > d'


def test_paragraphs_that_begin_alike_are_taken_once_over_all_packages(monkeypatch):
    monkeypatch.setattr(large_corpus, 'MIN_CHARACTERS', 1)
    seen: set[str] = set()
    other = LINE.replace('manual', 'guide')
    texts = [f'{LINE}\n\n{other}', LINE.replace('eight', 'eight (8)').upper()]
    assert [*large_corpus.select_documents(texts, 'prose', seen)] == [f'{LINE}\n\n{other}']
    assert [*large_corpus.select_documents([other, f'Also: {LINE}'], 'prose', seen)] == [f'Also: {LINE}']


def test_code_loses_only_long_paragraphs_that_occur_again(monkeypatch):
    monkeypatch.setattr(large_corpus, 'MIN_CHARACTERS', 1)
    licence, file = '/* ' + 'A licence. ' * 20 + '*/', 'int a;\n\tint b;\n\nint a;\n\tint b;'
    texts = [f'{licence}\n\n{file}', f'{licence}\n\n{file}']
    assert [*large_corpus.select_documents(texts, 'code', set())] == [texts[0], file]


def test_long_file_becomes_documents_of_whole_paragraphs(monkeypatch):
    monkeypatch.setattr(large_corpus, 'MIN_CHARACTERS', 10)
    monkeypatch.setattr(large_corpus, 'MAX_CHARACTERS', 100)
    lines = [f'{letter} {LINE}' for letter in 'ABCDE']
    documents = ['\n\n'.join(lines[:2]), '\n\n'.join(lines[2:3]), '\n\n'.join(lines[3:])]
    assert [*large_corpus.select_documents(['\n\n'.join(lines), 'short'], 'prose', set())] == documents
