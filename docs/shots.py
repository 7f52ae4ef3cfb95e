"""Draws docs/images/console-*.png: the console in Chromium while the demo plays its script. `make shots`.

What is shown is simulated and says so. The pictures are taken when the guard has acted, or after `LONGEST` seconds.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
LONGEST = 240.0
TOLD = ("guarded", "harmful", "departed")
LAPTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}


@contextlib.contextmanager
def demo() -> Iterator[str]:
    """`kvguard demo` on a free port; gives its URL."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}
    command = [sys.executable, "-u", "-m", "guard.cli", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None  # noqa: S101  it is a pipe
        url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
        try:
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()


def wait(url: str) -> str:
    """Waits until there is a break-even of the demo's own and a verdict worth showing; returns the verdict."""
    end = time.monotonic() + LONGEST
    state = ""
    while state not in TOLD and time.monotonic() < end:
        time.sleep(1.0)
        told = httpx2.get(f"{url}/v1/picture", timeout=30).json()
        own = told["picture"] is not None and told["picture"]["break_even"]["source"] != "prior"
        state = told["headline"]["state"] if own else ""
    return state


def shoot(browser: Browser, url: str, name: str, *, details: bool = False, **context: Any) -> None:
    """One picture of the whole page; with `details` also of the switch and of a request."""
    held = browser.new_context(**context)
    page = held.new_page()
    page.goto(url)
    page.wait_for_selector("#requests button")
    page.wait_for_timeout(3000)
    picture(page, f"console-{name}", full_page=True)
    if details:
        page.locator("#engines button").first.click()
        page.wait_for_selector("#switch-dialog[open]")
        picture(page, "console-switch")
        page.keyboard.press("Escape")
        page.locator("#requests button:has(.road-remote, .road-skip, .road-decline)").first.click()
        page.wait_for_selector("#request-dialog .parts")
        picture(page, "console-request")
    held.close()


def picture(page: Page, name: str, *, full_page: bool = False) -> None:
    """Writes docs/images/NAME.png."""
    page.screenshot(path=IMAGES / f"{name}.png", full_page=full_page)
    sys.stdout.write(f"docs/images/{name}.png\n")


def main() -> None:
    """All pictures."""
    IMAGES.mkdir(exist_ok=True)
    with demo() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        sys.stdout.write(f"verdict when the pictures were taken: {wait(url) or 'none'}\n")
        shoot(browser, url, "light", details=True, color_scheme="light", **LAPTOP)
        shoot(browser, url, "dark", color_scheme="dark", **LAPTOP)
        shoot(browser, url, "phone", color_scheme="dark", **PHONE)
        browser.close()


if __name__ == "__main__":
    main()
