// the open chapter is in view in the menu
addEventListener("DOMContentLoaded", () => {
  const box = document.querySelector(".sidebar-scroll"), open = box?.querySelector(".sidebar-tree .current-page > .reference");
  if (open) box.scrollTop += open.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 3;
});
