"""pip's settings as uv's: every form that pip writes them in."""

from deploy.pip_settings import read_environment, read_settings, uv_settings


def test_environment_goes_over_pip_conf() -> None:
    listing = "global.index-url='https://a/simple'\n:env:.index-url='https://b/simple'\n"
    assert read_settings(listing) == {"index-url": "https://b/simple"}


def test_other_commands_sections_are_left_out() -> None:
    assert read_settings("download.index-url='https://a/simple'\n") == {}


def test_lists_are_separated_as_uv_wants_them() -> None:
    settings = {"extra-index-url": "\nhttps://a/simple\nhttps://b/simple", "find-links": "/x /y"}
    assert uv_settings(settings) == {"UV_INDEX": "https://a/simple https://b/simple", "UV_FIND_LINKS": "/x,/y"}


def test_no_index_leaves_uv_an_empty_one() -> None:
    settings = {"index-url": "https://a/simple", "extra-index-url": "https://b/simple", "find-links": "/x"}
    assert uv_settings({**settings, "no-index": "true"}) == {
        "UV_DEFAULT_INDEX": "file:///nonexistent",
        "UV_FIND_LINKS": "/x",
    }
    assert uv_settings({"no-index": "false"}) == {}


def test_index_and_certificate_keep_their_values() -> None:
    assert uv_settings({"index-url": "https://a/simple", "cert": "/c.pem"}) == {
        "UV_DEFAULT_INDEX": "https://a/simple",
        "SSL_CERT_FILE": "/c.pem",
    }


def test_environment_is_read_without_pip_too() -> None:
    assert read_environment({"PIP_EXTRA_INDEX_URL": "https://a/simple", "HOME": "/h"}) == {
        "extra-index-url": "https://a/simple"
    }
