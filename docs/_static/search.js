// The order of the search's results: what a page is called, what its headings say, then how often it has the words.
// Sphinx's index knows titles, headings and entries, `Counts` (docs/search.py) how often, and what other engines call the same.
const Rank = (() => {
  const less = [[/^(glossary|changelog|contributing|made\/c-sources)$/, .45], [/^index$/, .7], [/^made\/(part|ring|core|path)/, .7], [/^made\//, .8]];
  const stemmer = new Stemmer(), rare = files => Math.log(1 + Counts.pages.length / files);
  const own = (o, key) => Object.prototype.hasOwnProperty.call(o, key) ? o[key] : undefined;

  // stems, as docs/search.py makes them: of `page_size` and `--page-size` the whole name and its parts
  const known = new Map();
  function words(text, whole = true) {
    const key = `${whole}${text}`;
    if (!known.has(key)) known.set(key, split(text, whole));
    return known.get(key);
  }
  function split(text, whole) {
    const named = text.toLowerCase().replace(/(?<!\w)--[a-z0-9]+(?:-[a-z0-9]+)+/g, o => o.replaceAll("-", "_"));
    return (named.match(/[\p{L}\p{N}]+(?:_[\p{L}\p{N}]+)*/gu) || []).flatMap(word => !word.includes("_") ? [stemmer.stemWord(word)]
      : [...(whole ? [word] : []), ...word.split("_").map(o => stemmer.stemWord(o))]);
  }
  // a word of the query: {pages: how often each has it}; one that is nowhere stands for those that begin with it
  function postings(word) {
    const found = new Map(), known = own(Counts.words, word);
    const lists = known ? [known] : word.length < 3 ? [] : Object.keys(Counts.words).filter(o => o.startsWith(word)).map(o => Counts.words[o]);
    for (const list of lists) for (let i = 0; i < list.length; i += 2) found.set(list[i], (found.get(list[i]) || 0) + list[i + 1]);
    return found;
  }
  const joined = text => words(text, false).join(" ");
  const within = (all, part) => ` ${all} `.includes(` ${part} `);

  // [[page, score, heading, its anchor]], the best first
  function pages(query, index) {
    const asked = [...new Set(words(query).filter(o => !stopwords.has(o)))];
    const terms = (asked.length ? asked : words(query)).map(word => [word, postings(word)]).map(([word, found]) => ({word, found, weight: rare(found.size || 1)}));
    const phrase = joined(query), spoken = words(query).join(" "), total = terms.reduce((sum, o) => sum + o.weight, 0) || 1, names = new Map(Counts.pages.map((o, i) => [o, i]));
    const mean = Counts.lengths.reduce((a, b) => a + b) / Counts.lengths.length, score = new Map(), best = new Map();
    const add = (page, n) => score.set(page, (score.get(page) || 0) + n);
    const share = text => { const o = new Set(words(text)); return terms.reduce((sum, t) => sum + (o.has(t.word) ? t.weight : 0), 0) / total; };
    // how often, of pages that have all words if there are some
    const has = new Map();
    for (const {found, weight} of terms) for (const [page, n] of found) {
      has.set(page, (has.get(page) || 0) + weight / total);
      add(page, 10 * weight / total * n / (n + .5 + Counts.lengths[page] / mean));
    }
    for (const [page, part] of has) score.set(page, score.get(page) * part ** 3);
    // titles and headings
    for (const [text, places] of Object.entries(index.alltitles)) {
      const part = share(text);
      if (part < .5) continue;
      const same = joined(text) === phrase, close = within(joined(text), phrase), brief = terms.length / (terms.length + words(text).length);
      for (const [file, id] of places) {
        const page = names.get(index.docnames[file]);
        if (page === undefined) continue;
        const title = index.titles[file] === text, worth = (title ? 10 : 4) * part ** 2 * (.6 + brief) + (same ? 6 : close ? 3 : 0) * (title ? 1.5 : .7);
        if (worth > (best.get(page)?.worth || 0)) best.set(page, {worth, text: title ? "" : text, id: title ? "" : id});
      }
    }
    for (const [page, {worth}] of best) add(page, worth);
    // entries of the glossary that name a chapter, and what others call the same
    const said = new Map();
    const claim = (page, n) => page !== undefined && said.set(page, Math.max(said.get(page) || 0, n));
    for (const [entry, places] of Object.entries(index.indexentries)) {
      if (joined(entry) === phrase) for (const [file, , main] of places) if (main) claim(names.get(index.docnames[file]), 16);
    }
    for (const [words, place] of Counts.said) {
      if ([phrase, spoken, asked.join(" ")].includes(words)) claim(names.get(place), 14);
      else if (within(phrase, words)) claim(names.get(place), 14 * words.length / phrase.length);
    }
    for (const [page, n] of said) add(page, n);
    return [...score].map(([page, n]) => [Counts.pages[page], n * (less.find(([o]) => o.test(Counts.pages[page]))?.[1] || 1), best.get(page)?.text, best.get(page)?.id])
      .sort((a, b) => b[1] - a[1]);
  }
  return {pages};
})();

Search._performSearch = (query, terms, excluded, highlight, objectTerms) => {   // the last one is shown first
  document.getElementById("search-progress")?.replaceChildren();
  const index = Search._index, at = new Map(index.docnames.map((o, i) => [o, i])), exact = query.trim().toLowerCase();
  const found = Rank.pages(query, index).slice(0, 60).map(([page, score, heading, id]) => [page, index.titles[at.get(page)] + (heading ? ` > ${heading}` : ""), id ? `#${id}` : "", null,
    Math.round(score * 10) / 10, index.filenames[at.get(page)], heading ? SearchResultKind.title : SearchResultKind.text]);
  const objects = [...objectTerms].flatMap(o => Search.performObjectSearch(o, objectTerms)).sort((a, b) => b[4] - a[4] || a[1].length - b[1].length);
  const same = objects.filter(o => o[1].toLowerCase().split(".").includes(exact)).slice(0, 20), others = objects.filter(o => !same.includes(o)).slice(0, 20);
  return [...found.slice(0, 3), ...same, ...found.slice(3), ...others].reverse();
};

// an excerpt shows no imports
const pageText = Search.htmlToText;
Search.htmlToText = (...page) => pageText(...page).replace(/^(from [\w.]+ )?import (\([^)]*\)|.*)$/gm, "");
