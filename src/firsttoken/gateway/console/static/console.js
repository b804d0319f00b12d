// Language and theme are kept in cookies that hold nothing else; the server reads them when it makes a page.
function prefer(name, value) {
  const secure = location.protocol === "https:" ? "; Secure" : "";
  document.cookie = `firsttoken-${name}=${value}; Path=/; Max-Age=31536000; SameSite=Strict${secure}`;
  location.reload();
}

// Moments are shown in the time zone of whoever looks: the time alone if it was today, else with its date.
function showTimes(root) {
  for (const element of root.querySelectorAll("time[data-at]")) {
    const moment = new Date(Number(element.dataset.at));
    const two = (number) => String(number).padStart(2, "0");
    const day = `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
    const time = `${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}`;
    const words = moment.toDateString() === new Date().toDateString() ? time : `${day} ${time}`;
    if (element.textContent !== words) element.textContent = words;
  }
}
new MutationObserver(() => showTimes(document)).observe(document, { childList: true, subtree: true });

// A talk that grows is followed, unless its reader has scrolled up.
let following = true;
addEventListener("scroll", () => {
  following = innerHeight + scrollY >= document.documentElement.scrollHeight - 120;
}, { passive: true });
new MutationObserver((changes) => {
  if (following && changes.some((change) => change.target.parentElement?.closest(".talk"))) {
    scrollTo({ top: document.documentElement.scrollHeight });
  }
}).observe(document, { childList: true, characterData: true, subtree: true });
