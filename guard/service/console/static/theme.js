// Runs before the page is drawn, so that it does not flash: the person's choice, else the system's.
(() => {
  const root = document.documentElement;
  const chosen = localStorage.getItem("kvguard-theme");
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
})();
