// What a client's program prints: a line of JSON for each thing it tried.
export const [URL_, MODEL] = process.argv.slice(2);

export async function attempt(name, work) {
  let problem = null;
  try {
    if (!(await work())) problem = "the answer was empty";
  } catch (error) {
    console.error(error);
    problem = `${error.name}: ${error.message}`.split("\n")[0].slice(0, 160);
  }
  console.log(JSON.stringify({ name, problem }));
}
