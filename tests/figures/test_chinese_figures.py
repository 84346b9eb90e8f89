"""Figures in Chinese: every text of every figure, the font, lines that fit, and what is said where no font is there."""
import warnings

import pytest
from chinese import english
from matplotlib.text import Text

from kvlab.attention import variants
from kvlab.figures import _language, figures, make, save
from kvlab.figures._caption import Caption
from kvlab.figures._language import breadth, wrapped
from kvlab.figures._make import shows
from kvlab.lang import translated


@pytest.fixture
def any_font(monkeypatch):
    """No font with Chinese characters is needed to know what a figure says."""
    monkeypatch.setattr(_language, "font", lambda: "DejaVu Sans")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def texts(figure):
    """Every text of the figure as it is drawn, ticks too."""
    for ax in (*figure.axes, *(child for one in figure.axes for child in one.child_axes)):
        for axis in (ax.xaxis, ax.yaxis):
            axis.get_ticklabels(which="both")                   # makes them anew
    yield from (text.get_text() for text in figure.findobj(Text) if text.get_visible())


NAMES = frozenset([*variants.names(), "copy", "read"])          # the last two: operations beside the variants


@pytest.mark.parametrize("name", figures.names())
def test_a_figure_of_shipped_data_is_chinese_but_for_names(name, any_font):
    said = [text for text in texts(make(name, lang="zh")) if text]
    assert [(text, english(text, NAMES)) for text in said if english(text, NAMES)] == []
    assert any("\u4e00" <= letter <= "\u9fff" for text in said for letter in text)


@pytest.mark.parametrize("name", figures.names())
def test_what_a_figure_shows_has_chinese_words_for_its_caption(name):
    told = Caption(shows(name), ("nothing measured: simulated · run x-1", "hollow: simulated"), (), "zh")
    assert english(told.metadata("pdf")["Title"]) == [] and translated(shows(name), "zh") != shows(name)
    assert told.text.endswith("。没有实测：仿真 · 运行 x-1。空心：仿真。")
    assert Caption(*told[:3]).text == f"{shows(name)}. nothing measured: simulated · run x-1. hollow: simulated."


def test_a_label_broken_to_fit_stays_as_narrow_and_english_ones_are_as_they_were(any_font):
    chinese, plain = (make("capacity", lang=lang).axes[2].get_xlabel() for lang in ("zh", "en"))
    assert "\n" in plain and max(map(breadth, chinese.split("\n"))) <= max(map(len, plain.split("\n")))


def test_lines_break_between_chinese_characters_but_not_before_a_mark():
    text = "未画出：perf 没有给出数值：系统在 /sys/event_source/devices 下没有内存控制器计数器（uncore_imc、amd_umc）。"
    for width in range(26, 60):
        lines = wrapped(text, width)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert not any(line[0] in "，。：、）" for line in lines)
        assert width / 3 < max(map(breadth, lines)) <= width and len(lines) > 1
    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("a-long-word", 6) == ["a-", "long-", "word"] and wrapped("a-long-word", 6, whole_words=True) == [
        "a-long-word"]


@pytest.fixture
def fonts(monkeypatch, tmp_path):
    """Sets which fonts there are: family -> whether its outlines are TrueType."""
    def there(**found):
        listed = {name.replace("_", " "): truetype for name, truetype in found.items()}
        monkeypatch.setattr(_language, "_listed", lambda: {name: name for name in listed})
        monkeypatch.setattr(_language, "_outlines", listed.get)
        monkeypatch.setattr(_language, "findSystemFonts", lambda: [])
    _language.font.cache_clear()
    yield there
    _language.font.cache_clear()


def test_without_a_chinese_font_labels_stay_english_and_one_sentence_says_what_to_install(fonts):
    fonts()
    with pytest.warns(UserWarning) as said:
        figure, again = make("kv_size", lang="zh"), make("kv_context", lang="zh")
    assert len(said) == 1 and "no font with Chinese characters" in str(said[0].message)
    assert "apt install fonts-wqy-microhei" in str(said[0].message)
    assert figure.axes[0].get_ylabel() == "KV cache of one sequence, bf16 (GiB)" and figure.lang == again.lang == "en"


def test_a_font_with_truetype_outlines_goes_before_one_that_a_pdf_cannot_hold_as_type_42(fonts):
    fonts(Noto_Sans_CJK_SC=False, SimHei=True)
    assert _language.font() == "SimHei"
    _language.font.cache_clear()
    fonts(Noto_Sans_CJK_SC=False)
    with pytest.warns(UserWarning, match="Noto Sans CJK SC has no TrueType outlines"):
        assert _language.font() == "Noto Sans CJK SC"


def test_a_chinese_pdf_holds_its_fonts_as_type_42_and_settings_are_as_before(tmp_path):
    import matplotlib
    before = dict(matplotlib.rcParams)
    _language.font.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if _language.font() is None or not _language._outlines(_language._listed()[_language.font()]):
            pytest.skip("no Chinese font with TrueType outlines is installed here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")                          # a character without a glyph would be said
        pdf = save("kv_budget", None, tmp_path, ["pdf"], lang="zh")[0].read_bytes()
    assert _language.font().replace(" ", "").encode() in pdf and b"/Type3" not in pdf and b"/FontFile2" in pdf
    assert dict(matplotlib.rcParams) == before


def test_bad_input_is_one_clear_sentence(tmp_path):
    with pytest.raises(ValueError, match="'fr' is not there; allowed: en, zh"):
        make("kv_size", lang="fr")
    with pytest.raises(ValueError, match="choose --format pdf, or --lang en"):
        save("kv_size", None, tmp_path, ["pgf"], lang="zh")
    assert not list(tmp_path.iterdir())
