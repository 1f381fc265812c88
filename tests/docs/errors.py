from tests.docs.pages import ROOT
ERROR_PAGE = ROOT / "docs/reference/errors.md"
def error_page(): return "# Errors\n"
