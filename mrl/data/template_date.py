"""The date that a chat template writes: templates of Llama, gpt-oss and others ask `strftime_now` for the day's."""

from datetime import date

ASKED = "strftime_now"  # transformers' function in templates; an argument of this name comes before it


class TemplateDate(str):
    """A date as YYYY-MM-DD, which a template calls as transformers' function. It is text, and so goes as JSON."""

    def __call__(self, form: str) -> str:
        return date.fromisoformat(self).strftime(form)


def is_date(text: str) -> bool:
    """Tells whether a text is a date as YYYY-MM-DD."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
