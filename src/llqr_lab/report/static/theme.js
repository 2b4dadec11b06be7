// Before anything is drawn: colours as they were chosen last, which win over the system's.
"use strict";
try {
  const chosen = localStorage.getItem("llqr-report-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // a page from a file may have no storage: then it follows the system
}
