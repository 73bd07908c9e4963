// Light or dark: the system's, unless somebody chose.

const NAME = "nsm.theme";

export function bindTheme(select) {
  const apply = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  select.value = localStorage.getItem(NAME) ?? "system";
  apply(select.value);
  select.addEventListener("change", () => {
    localStorage.setItem(NAME, select.value);
    apply(select.value);
    document.dispatchEvent(new Event("themechange"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    document.dispatchEvent(new Event("themechange"));
  });
}
